"""The command line: the only place that parses arguments and prints.

Results go to stdout, everything else to stderr. Torch is imported by the commands, not here.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream.errors import Interrupted, Resumable, UserError

if TYPE_CHECKING:
    from rich.progress import Progress

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
REFRESH_S = 0.1


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
            asked = settings or configs.load({}, [text for text in set_ or () if "out=" in text])
            resume = str(runs.last(asked.out, settings.name if settings else None))
        with _Screen(quiet) as screen:
            screen.say("loading torch and the data ...")
            from slipstream.reporting import report
            from slipstream.training import train as run_training

            result = run_training(
                settings,
                overrides=() if settings else tuple(set_ or ()),
                watch=screen.show,
                resume=resume,
                force=force,
            )
            screen.say("drawing the report ...")
            path = report(result.run)
        _print_result(result.summary | {"report": str(path)}, as_json, quiet, _show_training)


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
        _print_result(found, as_json, quiet, _show_evaluation)


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
        _print_result(found, as_json, quiet, _show_prediction)


@app.command()
def report(run: RunFolder, set_: Set = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Draw a run's report.html again."""
    with _answering(as_json):
        if set_:
            raise UserError("a report has no settings; --set has nothing to change here")
        from slipstream.reporting import report as draw

        path = draw(run)
        _print_result({"run": str(run), "report": str(path)}, as_json, quiet, _show_report)


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


class _Screen:
    """What stderr shows while training: a bar on a terminal, else a line per validation."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, highlight=False, quiet=quiet, soft_wrap=True)
        self.bar: Progress | None = None
        self.drawn_at = 0.0
        self.loss = self.val_loss = "–"

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def show(self, event: dict[str, Any]) -> None:
        """Take in one event of the run."""
        match event["event"]:
            case "start":
                self._start(event)
            case "log" if self.bar:
                self.loss = f"{event['loss']:.4g}"
                self._draw(event["step"])
            case "step" if self.bar:
                self._draw(event["step"])
            case "epoch":
                self.val_loss = f"{event['val_loss']:.4g}"
                if not self.bar:
                    best = " (best)" if event["best"] else ""
                    self.say(
                        f"epoch {event['epoch']}: training {event['train_loss']:.4g}, validation "
                        f"{self.val_loss}{best}, {event['seconds']:.1f} s"
                    )
            case "resume":
                differs = f", but not bit for bit: {event['differs']}" if event["differs"] else ""
                self.say(f"going on from step {event['step']:,}{differs}")
            case "trouble":
                self.say(event["what"])
            case "fallback":
                self.say(f"{event['what']}: {event['why']}")
            case "recovery":
                self.say(f"{event['what']}: going on with {event['remedy']}")
            case "plan" if not 0.7 < event.get("ratio", 1.0) < 1.4:
                self.say(
                    f"the plan promised {event['promised_ms']:.3g} ms a step, the first epoch "
                    f"took {event['seen_ms']:.3g}"
                )
            case "trained":
                if self.bar:
                    self.bar.stop()
                    self.bar = None
                self.say(
                    f"{event['stopped']}: {event['step']:,} steps, best after epoch "
                    f"{event['best_epoch']:g}"
                )
            case "scoring":
                self.say(f"scoring {event['what']} ...")

    def _start(self, event: dict[str, Any]) -> None:
        counts, plan = event["windows"], event["plan"]
        self.say(
            f"{event['series']:,} series; windows: {counts['train']:,} training, "
            f"{counts['val']:,} validation, {counts['test']:,} test; "
            f"{event['parameters']:,} parameters"
        )
        for line in plan_lines(plan, event["steps_per_epoch"] * event["epochs"]):
            self.say(line)
        for note in event["notes"][:5]:
            self.say(f"note: {note}")
        if len(event["notes"]) > 5:
            self.say(f"note: and {len(event['notes']) - 5} more, in the report")
        if self.console.is_terminal and not self.console.quiet:
            self._open_bar(event)

    def _open_bar(self, event: dict[str, Any]) -> None:
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("epoch {task.fields[epoch]}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[speed]} steps/s"),
            progress.TextColumn("loss {task.fields[loss]}, validation {task.fields[val]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        self.steps_per_epoch, self.epochs = event["steps_per_epoch"], event["epochs"]
        total = self.steps_per_epoch * self.epochs
        self.bar.add_task("", total=total, epoch="1", loss="–", val="–", speed="–")
        self.bar.start()

    def _draw(self, step: int) -> None:
        """Move the bar, at most ten times a second: drawing costs a millisecond."""
        now = time.monotonic()
        if self.bar is None or now - self.drawn_at < REFRESH_S:
            return
        self.drawn_at = now
        task = self.bar.tasks[0]
        self.bar.update(
            task.id,
            completed=step,
            epoch=f"{min(step // self.steps_per_epoch + 1, self.epochs)}/{self.epochs}",
            loss=self.loss,
            val=self.val_loss,
            speed=f"{task.speed:,.3g}" if task.speed else "–",
        )
        self.bar.refresh()


def plan_lines(plan: dict[str, Any], num_steps: int) -> Iterator[str]:
    """What will run and why, in a few lines."""
    where = plan["hardware"].get("gpu", plan["hardware"]["cpu"])
    reasons = plan["reasons"]
    yield f"plan: {plan['device']} ({where}); data: {plan['home']} ({reasons['home']})"
    how = [plan["precision"] + _gain(plan, "precision = fp32", "fp32", reasons["precision"])]
    if plan["device"] == "cpu":
        how.append(f"{plan['threads']} threads ({reasons['threads']})")
    else:
        if plan["cudnn"]:
            how.append(_algorithm(plan))
        captured = "step captured" if plan["capture"] else "step eager"
        how.append(captured + _gain(plan, "capture = False", "eager", reasons["capture"]))
    if plan["micro_batch"]:
        how.append(f"{plan['micro_batch']} windows per pass ({reasons['micro_batch']})")
    yield f"plan: {'; '.join(how)}"
    if plan["ms_per_step"] is not None:
        from slipstream.reporting import seconds

        whole = seconds(plan["ms_per_step"] * num_steps / 1e3)
        yield (
            f"plan: {plan['ms_per_step']:.3g} ms a step, at most {whole} for {num_steps:,} steps; "
            f"{reasons['plan']}"
        )
    elif "plan" in reasons:
        yield f"plan: {reasons['plan']}"
    for item in plan["evidence"]:
        if "failed" in item or "refused" in item:
            why = item.get("failed") or item.get("refused")
            yield f"plan: not {item['candidate']}: {why}"


def _gain(plan: dict[str, Any], candidate: str, name: str, otherwise: str) -> str:
    """How much faster the plan is than what it was compared with, where that was measured."""
    for item in plan["evidence"]:
        if item["candidate"] == candidate and "ms" in item:
            ratio = item["ms"] / plan["ms_per_step"]
            return f", {ratio:.2g}x over {name}" if ratio > 1 else ""
    return f" ({otherwise})"


def _algorithm(plan: dict[str, Any]) -> str:
    """cuDNN's algorithm, by the kernels that ran where they are known."""
    ran = "persistent" if any("Persist" in name for name in plan["kernels"]) else "standard"
    names = {ran} if plan["kernels"] else set(plan["cudnn"])
    return f"cuDNN {' and '.join(sorted(names))} ({plan['reasons']['cudnn']})"


def _show_training(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import number, seconds, verdict

    table = Table(
        title=f"{found['name']}: test set, {found['windows']['test']:,} windows",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("MAE", "RMSE", "max error", "R²", "scaled MSE", "scaled MAE"):
        table.add_column(heading, justify="right")
    rows = {"model": (found["metrics"]["test"], found["scaled"]["test"])}
    for name, beside in found["baselines"].items():
        if beside:
            rows[name] = beside["metrics"]["test"], beside["scaled"]["test"]
    for name, (test, scaled) in rows.items():
        cells = [number(test[key]) for key in ("mae", "rmse", "max_error")]
        cells += [number(test["r2"], 4), number(scaled["mse"]), number(scaled["mae"])]
        table.add_row(name, *cells, style="bold" if name == "model" else None)
    console.print(table)
    console.print(verdict(found))
    console.print(
        f"{seconds(found['seconds'])} in all, {found['windows_per_s']:,.0f} training windows a "
        f"second; {found['stopped']}"
    )
    console.print(f"run: {found['run']}\nreport: {found['report']}", markup=False)


def _show_evaluation(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import number

    table = Table(title=f"{found['on']}: {found['windows']:,} windows", title_justify="left")
    table.add_column("target")
    for heading in ("MAE", "RMSE", "max error", "bias", "R²"):
        table.add_column(heading, justify="right")
    rows = dict(found["detail"]["per_target"])
    if len(rows) > 1:
        rows["all"] = found["metrics"]
    for name, test in rows.items():
        cells = [number(test[key]) for key in ("mae", "rmse", "max_error", "bias")]
        table.add_row(name, *cells, number(test["r2"], 4))
    console.print(table)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _show_prediction(found: dict[str, Any], console: Console) -> None:
    console.print(f"{found['rows']:,} rows written to {found['out']}", markup=False)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _show_report(found: dict[str, Any], console: Console) -> None:
    console.print(f"report: {found['report']}", markup=False)


if __name__ == "__main__":
    main()
