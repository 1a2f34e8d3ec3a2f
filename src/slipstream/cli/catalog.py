"""The command `runs`: list, show, compare, rank and remove runs. None of it loads torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import (
    RUN_HELP,
    CommandGroup,
    Json,
    Quiet,
    RunFolder,
    folder_option,
    parse_path,
)
from slipstream.cli.output import handle_errors, print_result
from slipstream.errors import UserError
from slipstream.object_storage import is_url
from slipstream.run_names import OUT
from slipstream.terminal.streams import SafeStream

if TYPE_CHECKING:
    from slipstream.catalog.listing import RunTable
    from slipstream.catalog.rows import RunRow

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
        from slipstream.catalog.listing import list_runs

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
        from slipstream.catalog.details import show_run
        from slipstream.catalog.listing import find_row
        from slipstream.config import to_json_values
        from slipstream.terminal.runs import print_run

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
        from slipstream.catalog.comparison import PAGE, compare_runs
        from slipstream.terminal.runs import print_comparison

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
        from slipstream.catalog.listing import RunTable, best_run
        from slipstream.terminal.runs import print_runs

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
        from slipstream.catalog.listing import RunTable, find_row

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
        from slipstream.catalog.removal import prune_runs

        options: dict[str, Any] = {"keep_best": keep_best, "metric": metric}
        rows = prune_runs(out or OUT, unfinished=unfinished, dry_run=True, **options)
        _remove(rows, yes, as_json, quiet)


def _remove(rows: list[RunRow], yes: bool, as_json: bool, quiet: bool) -> None:
    """Remove runs, once the user has agreed."""
    from slipstream.catalog.listing import RunTable
    from slipstream.catalog.removal import measure_size, remove_runs
    from slipstream.terminal.console import create_progress_console
    from slipstream.terminal.runs import format_size, print_runs

    num_bytes = sum(measure_size(row.run) for row in rows)
    what = f"{len(rows)} run{'s' * (len(rows) != 1)} ({format_size(num_bytes)})"
    if rows and not yes:
        print_runs(rows, create_progress_console(quiet=False))
        if not _ask(f"remove {what}?"):
            rows, num_bytes = RunTable(), 0
    remove_runs(*(row.run for row in rows))
    result = {"removed": [row.to_dict() for row in rows], "bytes": num_bytes}
    text = f"removed {what if rows else 'nothing'}"
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
    from slipstream.terminal.console import print_text
    from slipstream.terminal.runs import print_runs

    def print_table(_: Any, console: Any) -> None:
        if rows:
            print_runs(rows, console)
        else:
            print_text(console, nothing)

    print_result([row.to_dict() for row in rows], as_json, quiet, print_table)
