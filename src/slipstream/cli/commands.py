"""All commands as one application."""

from slipstream.cli.options import create_app
from slipstream.cli.runs import copy, evaluate, follow, predict, report, runs_app
from slipstream.cli.serving import serve, ui
from slipstream.cli.tools import (
    ExportCommand,
    bench_app,
    doctor,
    export,
    inspect,
    prepare,
    profile,
)
from slipstream.cli.training import auto, ensemble, pretrain, train, tune

app = create_app()
running = (
    inspect,
    prepare,
    auto,
    train,
    pretrain,
    tune,
    evaluate,
    predict,
    export,
    serve,
    report,
    ensemble,
)
for command in (*running, follow, copy, ui, doctor, profile):
    app.command(cls=ExportCommand if command is export else None)(command)
for group in (runs_app, bench_app):
    app.add_typer(group)
