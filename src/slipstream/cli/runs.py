"""Commands that use a finished run: evaluate, predict, report."""

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
    parse_path,
)
from slipstream.cli.output import handle_errors, print_result
from slipstream.errors import UserError


def evaluate(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option("--data", parser=parse_path, metavar="DATA", help=DATA_HELP)
    ] = None,
    on: Annotated[
        str, typer.Option(help="The set of the run's own data: train, val or test.")
    ] = "test",
    resample: Resample = False,
    ensemble: Ensemble = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a trained model on its own test set or on new data."""
    with handle_errors(as_json):
        from slipstream.evaluation import evaluate as run_evaluation

        overrides = tuple(set_ or ())
        result = run_evaluation(
            run,
            data,
            on=on,
            resample=resample,
            ensemble=ensemble,
            overrides=overrides,
            allow_code=allow_code,
        )
        print_result(result, as_json, quiet, terminal.print_evaluation)


def predict(
    run: RunFolder,
    data: Annotated[Path, typer.Argument(parser=parse_path, metavar="DATA", help=DATA_HELP)],
    out: Annotated[Path, typer.Option(help="The file to write: .csv, .parquet or .arrow.")] = Path(
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
    """Forecast the rows that follow each series, or estimate at every row (horizon 0)."""
    with handle_errors(as_json):
        from slipstream.prediction import predict as run_prediction
        from slipstream.prediction import write_predictions

        with warnings.catch_warnings(record=True) as caught:
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
        result = {
            "run": str(run),
            "out": str(out),
            "rows": table.num_rows,
            "model": table.schema.metadata[b"model"].decode(),
            "columns": table.column_names,
            "notes": [str(warning.message) for warning in caught],
        }
        print_result(result, as_json, quiet, terminal.print_prediction)


def report(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FOLDER",
            help="The folder to write to.",
            show_default="the run folder",
        ),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's report.html again."""
    with handle_errors(as_json):
        if set_:
            raise UserError("report has no settings, so --set does not apply")
        from slipstream.reporting import report as write_report

        path = write_report(run, out=out)
        print_result({"run": str(run), "report": str(path)}, as_json, quiet, terminal.print_report)
