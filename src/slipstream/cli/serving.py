"""Commands that start a server: serve, ui. They do not load torch."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.base.errors import UserError
from slipstream.cli.options import Ensemble, Json, Quiet, RunFolder, parse_path
from slipstream.cli.output import handle_errors, print_note, to_json_line, write_stdout

TOKEN = "SLIPSTREAM_TOKEN"


def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen at; 0 for any that is free.")
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN,
            show_envvar=False,
            help=f"What clients have to send as a bearer token; {TOKEN} sets it as well. It is "
            "needed for any address but this machine's own.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE",
            help="Load streams from this file, if it exists, and save them there at the end.",
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="The largest body.")] = 8.0,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows of one request.")] = 100_000,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests to work on at a time; more get status 503.")
    ] = 256,
    max_seconds: Annotated[
        float, typer.Option(min=0.01, help="The longest time that a request may take.")
    ] = 30.0,
    max_streams: Annotated[int, typer.Option(min=1, help="Streams to keep in memory.")] = 10_000,
    stream_idle: Annotated[
        float, typer.Option(min=0.01, help="Seconds without a row after which a stream goes.")
    ] = 3600.0,
    carried: Annotated[
        bool | None,
        typer.Option(
            "--carried/--windows",
            help="Carry the state of streams from row to row, or predict from windows; by default "
            "what the run was trained for, or what evaluate --stream advised.",
            show_default=False,
        ),
    ] = None,
    ensemble: Ensemble = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer predictions over HTTP, without torch.

    The first line on stdout is the server's URL; GET /schema describes what it answers.
    """
    with handle_errors(as_json, quiet):
        try:
            from slipstream.base.web_server import bind, format_url, is_loopback
        except ModuleNotFoundError as error:
            raise UserError(
                f"serve needs the package {error.name}; pip install 'slipstream[onnx,serve]'"
            ) from None
        if token is None and not is_loopback(host):
            raise UserError(
                f"--host {host} can be reached from other machines; set a token that clients have "
                f"to send: --token TEXT, or {TOKEN} in the environment"
            )
        if token is not None and (not token.isascii() or not token.isprintable() or not token):
            raise UserError("--token: is empty or has characters that a header cannot have")
        bound = bind(host, port)
        from slipstream import runs
        from slipstream.cli.startup import retain_modules
        from slipstream.data.table import avoid_pandas
        from slipstream.server.api import serve as run_server
        from slipstream.server.bodies import MEGABYTE, ServerLimits

        avoid_pandas()
        run = runs.find_run(run)
        url = format_url(bound)

        def announce(description: str) -> None:
            retain_modules()
            line = to_json_line({"url": url, "run": str(run)}) if as_json else f"{url}\n"
            write_stdout(line)
            if not quiet:
                print_note(f"serving {run}: {description}; Ctrl-C stops it")

        run_server(
            run,
            bound,
            token=token,
            limits=ServerLimits(
                body_bytes=round(max_body_mb * MEGABYTE),
                rows=max_rows,
                requests=max_requests,
                request_s=max_seconds,
                streams=max_streams,
                idle_s=stream_idle,
            ),
            ensemble=ensemble,
            regime="auto" if carried is None else "carried" if carried else "window",
            state=state,
            announce=announce,
        )


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
            from slipstream.app.app import serve as serve_app
        except ImportError as error:
            raise UserError(
                f"{error.name} is missing; install the extra: pip install 'slipstream[ui]'"
            ) from None
        from slipstream.app.workspace import Workspace

        workspace = Workspace(folder.resolve(), allow_code=allow_code, warm=not no_warm_worker)
        serve_app(workspace, host=host, port=port, browser=not no_browser)
