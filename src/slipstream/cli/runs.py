"""Commands that use a run: evaluate, predict, report, follow, copy."""

import json
import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import (
    DATA_HELP,
    RUN_HELP,
    AllowCode,
    Ensemble,
    Joins,
    Json,
    Quiet,
    Resample,
    RunFolder,
    Set,
    folder_option,
    parse_joins,
    parse_output,
    parse_path,
)
from slipstream.cli.output import handle_errors, print_note, print_result
from slipstream.cli.startup import import_modules
from slipstream.errors import UserError
from slipstream.run_names import OUT
from slipstream.terminal.results import print_evaluation, print_prediction, print_report
from slipstream.terminal.streaming import print_stream
from slipstream.terminal.tracking import print_followed, show_points

LOW_PRIORITY = 10
"""What is added to the niceness of a follower"""


def evaluate(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option("--data", parser=parse_path, metavar="DATA", help=DATA_HELP)
    ] = None,
    on: Annotated[
        str, typer.Option(help="The set of the run's own data: train, val or test.")
    ] = "test",
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Compare two ways to use the model on a stream of rows: a window each time, or a "
            "state that is carried on.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_output,
            metavar="FILE",
            help="With --stream: the HTML page to write.",
            show_default=False,
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            parser=parse_output,
            metavar="FILE",
            help="Also write the predictions beside the true values: .parquet.",
            show_default=False,
        ),
    ] = None,
    resample: Resample = False,
    ensemble: Ensemble = None,
    join: Joins = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a trained model on its own test set or on new data."""
    with handle_errors(as_json, quiet):
        if out is not None and not stream:
            raise UserError("--out is the page of --stream; pass --stream as well, or remove it")
        with import_modules():
            from slipstream.evaluation import evaluate as run_evaluation

        options: dict[str, Any] = {
            "resample": resample,
            "ensemble": ensemble,
            "joins": parse_joins(join),
            "allow_code": allow_code,
            "predictions": predictions,
        }
        result = run_evaluation(
            run, data, on=on, overrides=tuple(set_ or ()), stream=stream, **options
        )
        if out is not None:
            from slipstream.reporting.streaming import write_stream_page

            result["page"] = str(write_stream_page(out, result))
        print_result(result, as_json, quiet, print_stream if stream else print_evaluation)


def predict(
    run: RunFolder,
    data: Annotated[Path, typer.Argument(parser=parse_path, metavar="DATA", help=DATA_HELP)],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_output, metavar="FILE", help="The file to write: .csv, .parquet or .arrow."
        ),
    ] = Path("predictions.csv"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    every: Annotated[
        bool, typer.Option("--every", help="Forecast from every row, not only from the end.")
    ] = False,
    resample: Resample = False,
    ensemble: Ensemble = None,
    join: Joins = None,
    allow_code: AllowCode = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forecast the rows after each series, or estimate every row.

    A model with data.horizon = 0 estimates its targets at every row.
    """
    with handle_errors(as_json, quiet):
        if out.exists() and not out.is_dir() and not force:
            raise UserError(f"{out}: exists; pass --force to replace it, or name another file")
        from slipstream import runs

        with import_modules():
            from slipstream.prediction import predict as run_prediction
            from slipstream.prediction import write_predictions

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options: dict[str, Any] = {
                "resample": resample,
                "ensemble": ensemble,
                "joins": parse_joins(join),
                "allow_code": allow_code,
            }
            run = runs.find_run(run)
            table = run_prediction(run, data, every=every, overrides=tuple(set_ or ()), **options)
        write_predictions(table, out)
        metadata = table.schema.metadata
        result = {
            "run": str(run),
            "out": str(out),
            "rows": table.num_rows,
            "model": metadata[b"model"].decode(),
            **({"filter": json.loads(metadata[b"filter"])} if b"filter" in metadata else {}),
            "columns": table.column_names,
            "notes": [str(warning.message) for warning in caught],
        }
        print_result(result, as_json, quiet, print_prediction)


def report(
    run: RunFolder,
    out: Annotated[Path | None, folder_option("The folder to write to.", "the run folder")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's report.html again."""
    with handle_errors(as_json, quiet):
        from slipstream import runs
        from slipstream.reporting.page import report as write_report

        run = runs.find_run(run)
        path = write_report(run, out=out)
        print_result({"run": str(run), "report": str(path)}, as_json, quiet, print_report)


def follow(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="The tracker: tensorboard, mlflow or wandb.")],
    out: Annotated[
        str | None,
        typer.Option(
            help="TensorBoard: the folder. MLflow: the server's address (default: "
            "MLFLOW_TRACKING_URI). Weights & Biases: the folder of its files.",
            show_default=False,
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(help="MLflow's experiment, or the project of Weights & Biases.")
    ] = "slipstream",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Send what a run logs to a tracker, while it trains or afterwards.

    Training is not touched: this process reads the run's log. It ends with the run; run it again
    after a resume, and it goes on where it was.
    """
    with handle_errors(as_json, quiet):
        if hasattr(os, "nice"):
            os.nice(LOW_PRIORITY)  # training comes first
        from slipstream.text.passwords import holds_secret
        from slipstream.tracking.api import follow as follow_run

        if out is not None and "://" in out and holds_secret(out):
            print_note(
                "slipstream: warning: --out contains a password, which every user of this machine "
                "can see in the process list; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD instead"
            )
        with show_points(quiet or as_json) as show:
            options: dict[str, Any] = {
                "show": show,
                "warn": lambda text: print_note(f"slipstream: {text}"),
            }
            result: dict[str, Any] = follow_run(run, to, out=out, project=project, **options)
        print_result(result, as_json, quiet, print_followed)


def copy(
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"A URL of a copy, or {RUN_HELP}")],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help="Where the run's folder is put into: a URL such as s3://bucket/runs, or a folder.",
        ),
    ] = OUT,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a run to object storage (s3://, gs://, az://), or from there.

    Every file is verified by its SHA-256 sum. Repeated, the command sends only what has changed. A
    run that is training is refused; one that has stopped is copied with its checkpoints.
    """
    with handle_errors(as_json, quiet):
        from slipstream.catalog.copies.api import copy_run
        from slipstream.terminal.runs import print_copy, show_bytes

        with show_bytes(quiet or as_json) as show:
            result = copy_run(run, to, show=show)
        print_result(result, as_json, quiet, print_copy)
