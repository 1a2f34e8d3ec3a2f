"""Commands about the machine, data and files: doctor, profile, bench, inspect, prepare, export."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from slipstream.base.errors import UserError
from slipstream.cli.options import (
    DATA_HELP,
    AllowCode,
    CommandGroup,
    Ensemble,
    Json,
    Quiet,
    RunFolder,
    Set,
    folder_option,
    parse_output,
    parse_path,
)
from slipstream.cli.output import handle_errors, print_result
from slipstream.cli.startup import import_modules
from slipstream.reporting.terminal.progress import LOADING, ProgressMeter, TrainingDisplay
from slipstream.reporting.terminal.results import (
    print_bench,
    print_doctor,
    print_export,
    print_prepared_rows,
    print_profile,
)


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB",
            help="A TOML file: also check its data and settings, and measure changes of them.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check the machine, or a job too, and suggest fixes for problems.

    Tries every technique that training may use, and times it. For a job, it also checks the data
    and the settings, and measures changes of them for a few seconds each.
    """
    with handle_errors(as_json, quiet):
        with TrainingDisplay(quiet) as display:
            display.say("loading torch ...")
            from slipstream.tools.doctor import examine
            from slipstream.tools.doctor.trials import examine_job

            job = {} if config is None else {"job": examine_job(config, display.say)}
            findings = examine(display.say) | job
        print_result(findings, as_json, quiet, print_doctor)


def profile(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo is profiled.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, max=200, help="The number of steps to record.")] = 30,
    out: Annotated[
        Path | None, folder_option("The folder to create the result in.", "profiles")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write a trace for TensorBoard.")
    ] = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show where a training step spends its time.

    Also measures changes that would make it faster.
    """
    with handle_errors(as_json, quiet), TrainingDisplay(quiet) as display:
        display.say(LOADING)
        from slipstream import config as configs
        from slipstream.tools.profiling import profile as run_profile

        result = run_profile(
            config or configs.load_demo(),
            overrides=tuple(set_ or ()),
            steps=steps,
            out=out,
            tensorboard=tensorboard,
            tell=display.say,
        )
        print_result(result, as_json, quiet, print_profile)


bench_app = typer.Typer(
    name="bench",
    cls=CommandGroup,
    help="Measure speed and accuracy on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="A TOML file; without one, the standard cases."),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0.05, help="Limit of the total time in minutes.", show_default=False),
]
Out = Annotated[
    Path | None, folder_option("The folder to write the results to.", "bench/<kind>-<time>")
]
Cases = Annotated[
    str, typer.Option(help="Standard cases to run: some of A, B, C, D, GRU, MLP, Transformer.")
]


@bench_app.command()
def ladder(
    config: ConfigFile = None,
    cases: Cases = "",
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start from a naive loop and add one technique at a time."""
    _run_bench("ladder", as_json, quiet, config, set_, cases=cases, minutes=minutes, out=out)


@bench_app.command()
def parity(
    config: ConfigFile = None,
    seeds: Annotated[int, typer.Option(help="The number of seeds.")] = 3,
    margin: Annotated[float, typer.Option(help="The accepted loss of accuracy in percent.")] = 0.5,
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the accuracy with a naive loop, seed by seed."""
    options = {"seeds": seeds, "margin": margin / 100, "minutes": minutes, "out": out}
    _run_bench("parity", as_json, quiet, config, set_, **options)


@bench_app.command()
def peers(
    config: ConfigFile = None,
    cases: Cases = "",
    jobs: Annotated[
        bool,
        typer.Option("--jobs/--no-jobs", help="Also time whole jobs to the same validation loss."),
    ] = True,
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the speed with Lightning and a plain PyTorch loop."""
    options = {"cases": cases, "jobs": jobs, "minutes": minutes, "out": out}
    _run_bench("peers", as_json, quiet, config, set_, **options)


@bench_app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A folder of earlier results.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A folder of later results.")],
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the changes between two result folders.

    Only changes beyond the spread of the measurements count.
    """
    with handle_errors(as_json, quiet):
        from slipstream.tools.bench import commands

        result = commands.compare(old, new, out=out)
        print_result(result, as_json, quiet, print_bench)


def _run_bench(
    command: str, as_json: bool, quiet: bool, config: Path | None, set_: Set, **options: Any
) -> None:
    with handle_errors(as_json, quiet):
        with ProgressMeter(quiet) as meter:
            meter.say(LOADING)
            from slipstream.tools.bench import commands

            run = getattr(commands, command)
            options = {name: value for name, value in options.items() if value is not None}
            if "cases" in options:
                names = map(str.strip, options["cases"].split(","))
                options["cases"] = [name for name in names if name]
            result = run(config, overrides=tuple(set_ or ()), watch=meter.show, **options)
        print_result(result, as_json, quiet, print_bench)


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A file, a folder or a pattern: `cells/*.csv`.")
    ],
    write: Annotated[
        Path | None,
        typer.Option(parser=parse_output, metavar="FILE", help="Write a config to begin with."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            parser=parse_output, metavar="FILE", help="Write a page with a plot per column."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing config.")] = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Describe data files, list their problems, and propose a config.

    --set takes the settings that say how files are read: data.encoding, data.decimal,
    data.skip_rows, data.names, data.sheet, data.variable.
    """
    with handle_errors(as_json, quiet):
        if write is not None and write.exists() and not force:
            raise UserError(f"{write}: exists; pass --force to replace it, or name another file")
        from slipstream import runs
        from slipstream.data.table import avoid_pandas
        from slipstream.reporting.page import write_inspection
        from slipstream.reporting.terminal.results import print_inspection
        from slipstream.tools.inspection import inspect_path

        avoid_pandas()
        findings = inspect_path(path, tuple(set_ or ()))
        result: dict[str, Any] = findings.to_dict()
        if write is not None:
            try:
                write.parent.mkdir(parents=True, exist_ok=True)
                runs.write_text(write, findings.format_config(write))
            except OSError as error:
                raise UserError(f"{write}: cannot be written ({error.strerror})") from None
            result |= {"written": str(write), "command": f"slipstream train {write}"}
        if html is not None:
            result["page"] = str(write_inspection(html, result, findings.list_courses()))
        print_result(result, as_json, quiet, print_inspection)


class ExportCommand(TyperCommand):
    """The command `export`, whose option `--after-prepare` may come without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from slipstream.config.prepare import STEPS

        option = "--after-prepare"
        if option in args:
            after = args.index(option) + 1
            if args[after : after + 1] != ["all"] and not STEPS.keys() & {*args[after : after + 1]}:
                args = [*args[:after], "all", *args[after:]]
        return super().parse_args(ctx, args)


def prepare(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_output, metavar="FILE", help="The file to write: .parquet, .csv or .arrow."
        ),
    ] = Path("rows.parquet"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the rows that training sees, with the set of each row.

    The rows are those after data.prepare and before scaling: time, inputs, targets, and a column
    that says train, val, test or unused.
    """
    with handle_errors(as_json, quiet):
        if out.exists() and not out.is_dir() and not force:
            raise UserError(f"{out}: exists; pass --force to replace it, or name another file")
        from slipstream import config as configs
        from slipstream.data.prepared_rows import load_prepared_rows, write_prepared_rows
        from slipstream.data.table import avoid_pandas, check_table_path

        avoid_pandas()
        check_table_path(out, "prepared rows")
        loaded = configs.load(config or configs.load_demo(), tuple(set_ or ()))
        rows = load_prepared_rows(loaded)
        columns = write_prepared_rows(rows, out).column_names
        result = {"out": str(out), **rows.summarize(), "columns": columns}
        print_result(result, as_json, quiet, print_prepared_rows)


def export(
    run: RunFolder,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="onnx, c, torch, hub, triton or ray.")
    ],
    out: Annotated[
        Path, typer.Option(parser=parse_output, metavar="FOLDER", help="The folder to create.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            parser=parse_path,
            metavar="DATA",
            help=f"Verify on these rows, not on the run's test set. {DATA_HELP}",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="For c: weights of 8 bits, if the test error allows it.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="For c: the prefix of its names (slip)."),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="For c, what a step does: carried goes on with the state of the row before, "
            "windows predicts the window of the last rows. Default: what the run was trained for, "
            "or what evaluate --stream advised.",
        ),
    ] = None,
    after_prepare: Annotated[
        str | None,
        typer.Option(
            "--after-prepare",
            metavar="[STEP]",
            help="For c: leave data.prepare to the caller, or its steps up to one, as in resample.",
        ),
    ] = None,
    ensemble: Ensemble = None,
    license_: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="NAME",
            help="For hub: the licence in the model card, as in apache-2.0.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model as files for other programs, verified.

    Every window of the test set is run through the files and compared with the model; where they
    differ, nothing is written.
    """
    with handle_errors(as_json, quiet):
        from slipstream import runs

        with import_modules():
            from slipstream.exporting.api import ExportOptions, export_run

        format_options = {
            "int8": int8,
            "name": name,
            "state": state,
            "after_prepare": after_prepare,
        }
        format_options["license"] = license_
        options = ExportOptions(
            data=data,
            force=force,
            ensemble=ensemble,
            allow_code=allow_code,
            overrides=tuple(set_ or ()),
            settings={key: value for key, value in format_options.items() if value},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on the data were printed by training
            result = export_run(runs.find_run(run), to, out, options)
        print_result(result, as_json, quiet, print_export)
