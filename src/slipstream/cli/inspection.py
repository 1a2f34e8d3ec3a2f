"""The command `inspect`. It does not load torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import Json, Quiet, Set, parse_output
from slipstream.cli.output import handle_errors, print_result
from slipstream.errors import UserError


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
    """Show what files contain, what is suspicious, and a config to try.

    --set takes what says how files are read: data.encoding, data.decimal, data.skip_rows,
    data.sheet, data.variable.
    """
    with handle_errors(as_json, quiet):
        if write is not None and write.exists() and not force:
            raise UserError(f"{write}: exists; pass --force to replace it, or name another file")
        from slipstream import runs
        from slipstream.data.io.memory import avoid_pandas
        from slipstream.inspection.api import inspect_path
        from slipstream.reporting.inspection import write_inspection
        from slipstream.terminal.inspection import print_inspection

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
