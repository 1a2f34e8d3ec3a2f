"""The command `ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.output import handle_errors
from slipstream.errors import UserError


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The folder with your data and runs.")
    ] = Path(),
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than loopback are reachable.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.")] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the URL and open nothing.")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help='Permit model.kind = "module:Class", which runs code.'),
    ] = False,
    no_warm_worker: Annotated[
        bool,
        typer.Option("--no-warm-worker", help="Keep no process ready with torch for the next job."),
    ] = False,
) -> None:
    """Open the app in the browser: data, training, results.

    The first line of stdout is its URL with a token. Jobs outlive the server.
    """
    with handle_errors(as_json=False):
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
        try:
            from slipstream.webapp.server import serve
        except ImportError as error:
            raise UserError(
                f"{error.name} is missing; install the extra: pip install 'slipstream[ui]'"
            ) from None
        from slipstream.webapp.workspace import Workspace

        workspace = Workspace(folder.resolve(), allow_code=allow_code, warm=not no_warm_worker)
        serve(workspace, host=host, port=port, browser=not no_browser)
