"""Commands about a run that is there: evaluate, predict, report."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from slipstream import terminal
from slipstream.cli.options import (
    DATA_HELP,
    AllowCode,
    Ensemble,
    Json,
    Quiet,
    Resample,
    RunFolder,
    Set,
    named,
)
from slipstream.cli.output import answering, print_result
from slipstream.errors import UserError


def evaluate(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option("--data", parser=named, metavar="DATA", help=DATA_HELP)
    ] = None,
    on: Annotated[
        str, typer.Option(help="Which of the run's own sets: train, val, test.")
    ] = "test",
    resample: Resample = False,
    ensemble: Ensemble = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a trained model, on its own test set or on new data."""
    with answering(as_json):
        from slipstream.evaluation import evaluate as run_evaluation

        overrides = tuple(set_ or ())
        found = run_evaluation(
            run,
            data,
            on=on,
            resample=resample,
            ensemble=ensemble,
            overrides=overrides,
            allow_code=allow_code,
        )
        print_result(found, as_json, quiet, terminal.print_evaluation)


def predict(
    run: RunFolder,
    data: Annotated[Path, typer.Argument(parser=named, metavar="DATA", help=DATA_HELP)],
    out: Annotated[Path, typer.Option(help="Where to write: .csv, .parquet or .arrow.")] = Path(
        "predictions.csv"
    ),
    every: Annotated[
        bool, typer.Option("--every", help="Forecast from every row, not only from the end.")
    ] = False,
    resample: Resample = False,
    ensemble: Ensemble = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forecast what follows each series, or estimate at every row (horizon 0)."""
    with answering(as_json):
        from slipstream.prediction import predict as run_prediction
        from slipstream.prediction import write_predictions

        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            overrides = tuple(set_ or ())
            table = run_prediction(
                run,
                data,
                every=every,
                resample=resample,
                ensemble=ensemble,
                overrides=overrides,
                allow_code=allow_code,
            )
        write_predictions(table, out)
        found = {"run": str(run), "out": str(out), "rows": table.num_rows}
        found["model"] = table.schema.metadata[b"model"].decode()
        found["columns"] = table.column_names
        found["notes"] = [str(note.message) for note in noted]
        print_result(found, as_json, quiet, terminal.print_prediction)


def report(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=named, metavar="FOLDER", help="Where to write.", show_default="the run's folder"
        ),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw a run's report.html again."""
    with answering(as_json):
        if set_:
            raise UserError("a report has no settings; --set has nothing to change here")
        from slipstream.reporting import report as draw

        path = draw(run, out=out)
        print_result({"run": str(run), "report": str(path)}, as_json, quiet, terminal.print_report)
