"""The command line: the only place that parses arguments.

Results go to stdout, everything else to stderr. Commands that need torch have it imported by a
thread while the rest of the command line is; others never import it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.base.signals import CTRL_C, accept_ctrl_c, leave_on_warning
from slipstream.cli import startup

WORKER = "ui-worker"
"""The first argument of a process that runs a job of the app; then a folder, a device, `--warm`"""


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        _work(*sys.argv[2:])
    accept_ctrl_c()
    leave_on_warning()
    with startup.record_exit_code():
        try:
            startup.begin(sys.argv[1:])
            from slipstream.reporting.terminal.streams import prepare_streams

            prepare_streams()
            _load_app(sys.argv[1:2])()
        except KeyboardInterrupt:  # before the command has begun, which handles it itself
            sys.stderr.write("slipstream: interrupted\n")
            sys.exit(128 + CTRL_C)


def _load_app(command: list[str]) -> Callable[[], None]:
    """Return the application with all commands; for a server only with its own, to start faster."""
    if command == [startup.SERVER]:
        from slipstream.cli.options import create_app
        from slipstream.cli.serving import serve

        app = create_app()
        app.command()(serve)
        return app
    from slipstream.cli.commands import app as every

    return every


def _work(folder: str, device: str, *options: str) -> None:
    """Wait for jobs of the app, run their commands in this process, and end."""
    from slipstream.app.jobs import work

    if "--warm" in options:
        from slipstream.data.table import avoid_pandas

        avoid_pandas()
    sys.exit(work(Path(folder), device, main, warm="--warm" in options))
