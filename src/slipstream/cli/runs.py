"""Commands that use a run: evaluate, predict, report, follow, copy."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.base.errors import UserError
from slipstream.base.run_names import OUT
from slipstream.base.storage import is_url
from slipstream.cli.options import (
    DATA_HELP,
    RUN_HELP,
    AllowCode,
    CommandGroup,
    Ensemble,
    Joins,
    Json,
    Quiet,
    Resample,
    RunFolder,
    Set,
    folder_option,
    parse_joins,
    parse_output,
    parse_path,
)
from slipstream.cli.output import handle_errors, print_note, print_result
from slipstream.cli.startup import import_modules
from slipstream.reporting.terminal.progress import show_points
from slipstream.reporting.terminal.results import (
    print_evaluation,
    print_followed,
    print_prediction,
    print_report,
    print_stream,
)
from slipstream.reporting.terminal.streams import SafeStream

if TYPE_CHECKING:
    from slipstream.reporting.run_rows import RunRow
    from slipstream.reporting.runs import RunTable

LOW_PRIORITY = 10
"""The niceness that a follower adds"""


def evaluate(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option("--data", parser=parse_path, metavar="DATA", help=DATA_HELP)
    ] = None,
    on: Annotated[
        str, typer.Option(help="The set of the run's own data: train, val or test.")
    ] = "test",
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Compare two ways to use the model on a stream of rows: a window each time, or a "
            "state that is carried on.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_output,
            metavar="FILE",
            help="With --stream: the HTML page to write.",
            show_default=False,
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            parser=parse_output,
            metavar="FILE",
            help="Also write the predictions beside the true values: .parquet.",
            show_default=False,
        ),
    ] = None,
    resample: Resample = False,
    ensemble: Ensemble = None,
    join: Joins = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a trained model on its own test set or on new data."""
    with handle_errors(as_json, quiet):
        if out is not None and not stream:
            raise UserError("--out is the page of --stream; pass --stream as well, or remove it")
        with import_modules():
            from slipstream.inference.evaluate import evaluate as run_evaluation

        options: dict[str, Any] = {
            "resample": resample,
            "ensemble": ensemble,
            "joins": parse_joins(join),
            "allow_code": allow_code,
            "predictions": predictions,
        }
        result = run_evaluation(
            run, data, on=on, overrides=tuple(set_ or ()), stream=stream, **options
        )
        if out is not None:
            from slipstream.reporting.streaming import write_stream_page

            result["page"] = str(write_stream_page(out, result))
        print_result(result, as_json, quiet, print_stream if stream else print_evaluation)


def predict(
    run: RunFolder,
    data: Annotated[Path, typer.Argument(parser=parse_path, metavar="DATA", help=DATA_HELP)],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_output, metavar="FILE", help="The file to write: .csv, .parquet or .arrow."
        ),
    ] = Path("predictions.csv"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    every: Annotated[
        bool, typer.Option("--every", help="Forecast from every row, not only from the end.")
    ] = False,
    resample: Resample = False,
    ensemble: Ensemble = None,
    join: Joins = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forecast the rows after each series, or estimate every row.

    A model with data.horizon = 0 estimates its targets at every row.
    """
    with handle_errors(as_json, quiet):
        if out.exists() and not out.is_dir() and not force:
            raise UserError(f"{out}: exists; pass --force to replace it, or name another file")
        from slipstream import runs

        with import_modules():
            from slipstream.inference.predict import predict as run_prediction
            from slipstream.inference.predict import write_predictions

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options: dict[str, Any] = {
                "resample": resample,
                "ensemble": ensemble,
                "joins": parse_joins(join),
                "allow_code": allow_code,
            }
            run = runs.find_run(run)
            table = run_prediction(run, data, every=every, overrides=tuple(set_ or ()), **options)
        write_predictions(table, out)
        metadata = table.schema.metadata
        result = {
            "run": str(run),
            "out": str(out),
            "rows": table.num_rows,
            "model": metadata[b"model"].decode(),
            **({"filter": json.loads(metadata[b"filter"])} if b"filter" in metadata else {}),
            "columns": table.column_names,
            "notes": [str(warning.message) for warning in caught],
        }
        print_result(result, as_json, quiet, print_prediction)


def report(
    run: RunFolder,
    out: Annotated[Path | None, folder_option("The folder to write to.", "the run folder")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's report.html again."""
    with handle_errors(as_json, quiet):
        from slipstream import runs
        from slipstream.reporting.page import report as write_report

        run = runs.find_run(run)
        path = write_report(run, out=out)
        print_result({"run": str(run), "report": str(path)}, as_json, quiet, print_report)


def follow(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="The tracker: tensorboard, mlflow or wandb.")],
    out: Annotated[
        str | None,
        typer.Option(
            help="TensorBoard: the folder. MLflow: the server's address (default: "
            "MLFLOW_TRACKING_URI). Weights & Biases: the folder of its files.",
            show_default=False,
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(help="MLflow's experiment, or the project of Weights & Biases.")
    ] = "slipstream",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Send a run's log to a tracker, while it trains or afterwards.

    Training is not touched: this process reads the run's log. It ends with the run; run it again
    after a resume, and it goes on where it was.
    """
    with handle_errors(as_json, quiet):
        if hasattr(os, "nice"):
            os.nice(LOW_PRIORITY)  # training comes first
        from slipstream.base.text import holds_secret
        from slipstream.reporting.tracking.follower import follow as follow_run

        if out is not None and "://" in out and holds_secret(out):
            print_note(
                "slipstream: warning: --out contains a password, which every user of this machine "
                "can see in the process list; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD instead"
            )
        with show_points(quiet or as_json) as show:
            options: dict[str, Any] = {
                "show": show,
                "warn": lambda text: print_note(f"slipstream: {text}"),
            }
            result: dict[str, Any] = follow_run(run, to, out=out, project=project, **options)
        print_result(result, as_json, quiet, print_followed)


def copy(
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"A URL of a copy, or {RUN_HELP}")],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help="Where the run's folder is put into: a URL such as s3://bucket/runs, or a folder.",
        ),
    ] = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a run to object storage (s3://, gs://, az://), or from there.

    Every file is verified by its SHA-256 sum. Repeated, the command sends only what has changed. A
    run that is training is refused; one that has stopped is copied with its checkpoints.
    """
    with handle_errors(as_json, quiet):
        from slipstream.reporting.copies import copy_run
        from slipstream.reporting.terminal.progress import show_bytes
        from slipstream.reporting.terminal.results import print_copy

        with show_bytes(quiet or as_json) as show:
            result = copy_run(run, to, show=show)
        print_result(result, as_json, quiet, print_copy)


DEFAULT = "list"


class RunsGroup(CommandGroup):
    """A group whose command `list` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_command = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if is_command else [DEFAULT, *args])


runs_app = typer.Typer(
    name="runs",
    cls=RunsGroup,
    help="List, compare and remove runs; without a command, list.",
    rich_markup_mode=None,
)

Out = Annotated[Path | None, folder_option("The folder that holds the runs.", OUT)]
Names = Annotated[
    list[Path],
    typer.Argument(parser=parse_path, metavar="RUN", help=f"Each {RUN_HELP}"),
]
Kind = Annotated[
    str | None,
    typer.Option("--kind", metavar="KIND", help="Only train, pretrain, search, probe or ensemble."),
]
Name = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Only names with this text, or like `job-*`.")
]
Data = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Only data with this text: a file, a target.")
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="METRIC",
        help="mae, rmse, r2, scaled_mse, log_loss, ...",
        show_default="mae or log_loss",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Remove without asking.")]


@runs_app.command(DEFAULT)
def list_command(
    folder: Annotated[
        Path | None,
        typer.Argument(
            parser=parse_path,
            metavar="FOLDER",
            help="The folder that holds the runs, or the URL of one with copies.",
            show_default=OUT,
        ),
    ] = None,
    out: Annotated[Path | None, folder_option("The same.", OUT)] = None,
    kind: Kind = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state", metavar="STATE", help="Only running, stopped, finished or damaged."
        ),
    ] = None,
    name: Name = None,
    data: Data = None,
    metric: Metric = None,
    sort: Annotated[
        str,
        typer.Option(metavar="BY", help="age, name, kind, data, test, baseline, state or seconds."),
    ] = "age",
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort the other way round.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List runs: their age, kind, data, test error and state."""
    with handle_errors(as_json, quiet):
        from slipstream.reporting.runs import list_runs

        where = out or folder or Path(OUT)
        if folder and not is_url(folder) and not folder.is_dir():
            commands = "list, show, compare, best, remove and prune"
            raise UserError(f"{folder}: there is no such folder; the commands are {commands}")
        filters = {"kind": kind, "state": state, "name": name, "data": data}
        rows = list_runs(where, **filters, metric=metric, sort=sort, reverse=reverse)
        _print_rows(rows, f"no runs in {where}", as_json, quiet)


@runs_app.command()
def show(run: RunFolder, out: Out = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Show one run: its settings, its result and the next command."""
    with handle_errors(as_json, quiet):
        from slipstream.config import to_json_values
        from slipstream.reporting.runs import find_row, show_run
        from slipstream.reporting.terminal.results import print_run

        details = show_run(run, out=out or OUT)
        row = find_row(details["run"])
        result = details | {"settings": to_json_values(details["settings"])}
        print_result(result, as_json, quiet, lambda _, console: print_run(details, row, console))


@runs_app.command()
def compare(
    runs: Names,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page to write.",
            show_default="comparison.html beside the runs",
        ),
    ] = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare runs: settings that differ, metrics and curves."""
    with handle_errors(as_json, quiet):
        from slipstream.reporting.runs import PAGE, compare_runs
        from slipstream.reporting.terminal.results import print_comparison

        comparison = compare_runs(*runs, out=out or OUT)
        page = comparison.write_html(html or comparison.runs[0].run.parent / PAGE)
        print_result(
            comparison.to_dict() | {"html": str(page)},
            as_json,
            quiet,
            lambda _, console: print_comparison(comparison, str(page), console),
        )


@runs_app.command()
def best(
    metric: Metric = None,
    kind: Kind = None,
    name: Name = None,
    data: Data = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the finished run with the best test error."""
    with handle_errors(as_json, quiet):
        from slipstream.reporting.runs import RunTable, best_run
        from slipstream.reporting.terminal.results import print_runs

        filters = {"kind": kind, "name": name, "data": data}
        row = best_run(out or OUT, metric=metric, **filters)
        table = RunTable([row])
        print_result(row.to_dict(), as_json, quiet, lambda _, console: print_runs(table, console))


@runs_app.command()
def remove(
    runs: Names, yes: Yes = False, out: Out = None, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Remove runs with all their files; asks first."""
    with handle_errors(as_json, quiet):
        from slipstream.reporting.runs import RunTable, find_row

        rows = RunTable(find_row(run, out or OUT) for run in runs)
        _remove(rows, yes, as_json, quiet)


@runs_app.command()
def prune(
    keep_best: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many runs to keep of the same data.")
    ] = 5,
    metric: Metric = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also remove stopped and damaged runs.")
    ] = False,
    yes: Yes = False,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove all but the best finished runs; asks first."""
    with handle_errors(as_json, quiet):
        from slipstream.reporting.runs import prune_runs

        options: dict[str, Any] = {"keep_best": keep_best, "metric": metric}
        rows = prune_runs(out or OUT, unfinished=unfinished, dry_run=True, **options)
        _remove(rows, yes, as_json, quiet)


def _remove(rows: list[RunRow], yes: bool, as_json: bool, quiet: bool) -> None:
    """Remove runs, once the user has agreed."""
    from slipstream.reporting.runs import RunTable, measure_size, remove_runs
    from slipstream.reporting.terminal.console import create_progress_console
    from slipstream.reporting.terminal.results import format_size, print_runs

    num_bytes = sum(measure_size(row.run) for row in rows)
    described = f"{len(rows)} run{'s' * (len(rows) != 1)} ({format_size(num_bytes)})"
    if rows and not yes:
        print_runs(rows, create_progress_console(quiet=False))
        if not _ask(f"remove {described}?"):
            rows, num_bytes = RunTable(), 0
    remove_runs(*(row.run for row in rows))
    result = {"removed": [row.to_dict() for row in rows], "bytes": num_bytes}
    text = f"removed {described if rows else 'nothing'}"
    print_result(result, as_json, quiet, lambda _, console: console.print(text))


def _ask(question: str) -> bool:
    stream = SafeStream(sys.stderr)  # typer.confirm would write to stdout too
    stream.write(f"{question} [y/N] ")
    stream.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise UserError("nobody answered, so nothing was removed; pass --yes to remove anyway")
    return answer.strip().lower() in ("y", "yes")


def _print_rows(rows: RunTable, nothing: str, as_json: bool, quiet: bool) -> None:
    from slipstream.reporting.terminal.console import print_text
    from slipstream.reporting.terminal.results import print_runs

    def print_table(_: Any, console: Any) -> None:
        if rows:
            print_runs(rows, console)
        else:
            print_text(console, nothing)

    print_result([row.to_dict() for row in rows], as_json, quiet, print_table)
