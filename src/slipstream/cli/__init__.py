"""The command line: the only place that parses arguments.

Results go to stdout, everything else to stderr. Commands that need torch have it imported by a
thread while the rest of the command line is; others never import it.
"""

import sys

from slipstream.cli import startup


def main() -> None:
    startup.begin(sys.argv[1:])
    from slipstream.cli.commands import app
    from slipstream.terminal.console import prepare_streams

    with startup.record_exit_code():
        prepare_streams()
        app()
