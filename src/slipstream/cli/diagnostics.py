"""Commands that measure the machine: doctor, profile and bench."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import CommandGroup, Json, Quiet, Set, folder_option
from slipstream.cli.output import handle_errors, print_result
from slipstream.terminal.bench import ProgressMeter, print_bench, print_profile
from slipstream.terminal.doctor import print_doctor
from slipstream.terminal.training import LOADING, TrainingDisplay


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB",
            help="A TOML file: also look at its data and settings, and try what often helps.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check the machine, or a job too, and suggest fixes for problems.

    Tries every technique that training may use, and times it. Of a job, it checks the data and the
    settings, and trains with what often helps for a few seconds each.
    """
    with handle_errors(as_json, quiet):
        with TrainingDisplay(quiet) as display:
            display.say("loading torch ...")
            from slipstream.doctor import examine, examine_job

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

    Also measures what would make it faster.
    """
    with handle_errors(as_json, quiet), TrainingDisplay(quiet) as display:
        display.say(LOADING)
        from slipstream import config as configs
        from slipstream.profiling import profile as run_profile

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
    """Compare the accuracy with that of a naive loop, seed by seed."""
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

    Only those that exceed the spread of the measurements count.
    """
    with handle_errors(as_json, quiet):
        from slipstream.bench import commands

        result = commands.compare(old, new, out=out)
        print_result(result, as_json, quiet, print_bench)


def _run_bench(
    command: str, as_json: bool, quiet: bool, config: Path | None, set_: Set, **options: Any
) -> None:
    with handle_errors(as_json, quiet):
        with ProgressMeter(quiet) as meter:
            meter.say(LOADING)
            from slipstream.bench import commands

            run = getattr(commands, command)
            options = {name: value for name, value in options.items() if value is not None}
            if "cases" in options:
                names = map(str.strip, options["cases"].split(","))
                options["cases"] = [name for name in names if name]
            result = run(config, overrides=tuple(set_ or ()), watch=meter.show, **options)
        print_result(result, as_json, quiet, print_bench)
