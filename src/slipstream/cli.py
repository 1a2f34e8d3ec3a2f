"""The command line: the only place that parses arguments and prints.

Results go to stdout, everything else to stderr. Torch is imported by the commands, not here.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream import screen
from slipstream.errors import Interrupted, Resumable, UserError
from slipstream.screen import Screen

app = typer.Typer(
    name="slipstream",
    help="Train sequence models on time series as fast as the hardware allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no summary.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Resample = Annotated[
    bool, typer.Option("--resample", help="Bring rows to the step that the model was trained on.")
]
DATA_HELP = "A file or folder with the columns that the model was trained on."


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from slipstream import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo trains.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with a run's folder, or with the last one: last."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Resume even though settings or data have changed.")
    ] = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, score it beside the baselines, write a report."""
    with _answering(as_json):
        from slipstream import config as configs
        from slipstream import runs

        settings = None
        if config or not resume:
            settings = configs.load(config or configs.demo(), set_ or ())
        if resume == "last":
            where = [text for text in set_ or () if text.startswith("out=")]
            asked = settings or configs.load({}, where)
            resume = str(runs.last(asked.out, settings.name if settings else None))
        with Screen(quiet) as watching:
            watching.say("loading torch and the data ...")
            from slipstream.reporting import report
            from slipstream.training import train as run_training

            result = run_training(
                settings,
                overrides=() if settings else tuple(set_ or ()),
                watch=watching.show,
                resume=resume,
                force=force,
            )
            watching.say("drawing the report ...")
            path = report(result.run)
        _print_result(result.summary | {"report": str(path)}, as_json, quiet, screen.show_training)


@app.command()
def evaluate(
    run: RunFolder,
    data: Annotated[Path | None, typer.Option("--data", help=DATA_HELP)] = None,
    on: Annotated[
        str, typer.Option(help="Which of the run's own sets: train, val, test.")
    ] = "test",
    resample: Resample = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a trained model, on its own test set or on new data."""
    with _answering(as_json):
        from slipstream.evaluation import evaluate as run_evaluation

        found = run_evaluation(run, data, on=on, resample=resample, overrides=tuple(set_ or ()))
        _print_result(found, as_json, quiet, screen.show_evaluation)


@app.command()
def predict(
    run: RunFolder,
    data: Annotated[Path, typer.Argument(metavar="DATA", help=DATA_HELP)],
    out: Annotated[Path, typer.Option(help="Where to write: .csv, .parquet or .arrow.")] = Path(
        "predictions.csv"
    ),
    every: Annotated[
        bool, typer.Option("--every", help="Forecast from every row, not only from the end.")
    ] = False,
    resample: Resample = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forecast what follows each series, or estimate at every row (horizon 0)."""
    with _answering(as_json):
        from slipstream.prediction import predict as run_prediction
        from slipstream.prediction import write

        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            table = run_prediction(
                run, data, every=every, resample=resample, overrides=tuple(set_ or ())
            )
        write(table, out)
        found = {"run": str(run), "out": str(out), "rows": table.num_rows}
        found["columns"] = table.column_names
        found["notes"] = [str(note.message) for note in noted]
        _print_result(found, as_json, quiet, screen.show_prediction)


@app.command()
def report(run: RunFolder, set_: Set = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Draw a run's report.html again."""
    with _answering(as_json):
        if set_:
            raise UserError("a report has no settings; --set has nothing to change here")
        from slipstream.reporting import report as draw

        path = draw(run)
        _print_result({"run": str(run), "report": str(path)}, as_json, quiet, screen.show_report)


@contextmanager
def _answering(as_json: bool) -> Iterator[None]:
    """Turn exceptions into a message on stderr, an object on stdout if asked, and an exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except (UserError, Resumable, Interrupted) as error:
        code = 75 if isinstance(error, Resumable) else 2
        if isinstance(error, Interrupted):
            code = 128 + error.signal_number
        _fail(str(error), as_json)
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        _fail("interrupted", as_json)
        raise typer.Exit(130) from None
    except Exception as error:
        traceback.print_exc()
        _fail(f"a fault of Slipstream's own: {type(error).__name__}: {error}", as_json)
        raise typer.Exit(1) from None


def _terminated(number: int, _: FrameType | None) -> None:
    raise Interrupted("terminated", signal_number=number)


def _fail(message: str, as_json: bool) -> None:
    print(f"slipstream: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message}))


def _print_result(found: dict[str, Any], as_json: bool, quiet: bool, show: Any) -> None:
    if as_json:
        from slipstream.runs import to_json

        print(to_json(found, indent=None))
    elif not quiet:
        width = None if sys.stdout.isatty() else 120  # a file or a pipe has room
        show(found, Console(highlight=False, soft_wrap=True, width=width))


if __name__ == "__main__":
    main()
