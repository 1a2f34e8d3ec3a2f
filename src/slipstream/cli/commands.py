"""All commands as one application."""

from typing import Annotated

import typer

from slipstream.cli.catalog import runs_app
from slipstream.cli.diagnostics import bench_app, doctor, profile
from slipstream.cli.exporting import export
from slipstream.cli.inspection import inspect
from slipstream.cli.runs import evaluate, predict, report
from slipstream.cli.serving import serve
from slipstream.cli.training import ensemble, pretrain, train, tune
from slipstream.cli.ui import ui

app = typer.Typer(
    name="slipstream",
    help="Train sequence models on time series as fast as the hardware allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _print_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from slipstream import __version__

        print(__version__)
        raise typer.Exit


running = (inspect, train, pretrain, tune, evaluate, predict, export, serve, report, ensemble)
for command in (*running, ui, doctor, profile):
    app.command()(command)
for group in (runs_app, bench_app):
    app.add_typer(group)
