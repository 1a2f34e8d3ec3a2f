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
from typing import Annotated, Any, Literal

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
Ensemble = Annotated[
    bool | None,
    typer.Option(
        "--ensemble/--single",
        help="Runs with train.repeats: the mean of all models, or the best one alone.",
        show_default="what was better on the validation set",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Go on with a run's folder, or with the last one: last."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Resume even though settings or data have changed.")
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
    resume: Resume = None,
    force: Force = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, score it beside the baselines, write a report."""
    _train("train", config, resume, force, set_, as_json, quiet)


def _train(
    verb: str,
    config: Path | None,
    resume: str | None,
    force: bool,
    set_: list[str] | None,
    as_json: bool,
    quiet: bool,
) -> None:
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
            from slipstream import training
            from slipstream.reporting import report

            run = {"train": training.train, "pretrain": training.pretrain}[verb]
            result = run(
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
def pretrain(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; targets and labels are not needed. Without one, the embedded probe."
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Then train this from scratch, frozen and fine-tuned, and say whether it helped.",
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Probe with the encoder of this run, not a new one."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of each way to probe.")] = 10,
    resume: Resume = None,
    force: Force = False,
    set_: Set = None,
    probe_set: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="As --set, for the config to probe with."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pre-train an encoder on windows without labels, for train.init_from; or see if it helps."""
    if probe is None and encoder is None and (config is not None or resume is not None):
        _train("pretrain", config, resume, force, set_, as_json, quiet)
        return
    with _answering(as_json):
        from slipstream import config as configs

        if probe is None and encoder is not None:
            raise UserError("--encoder goes with --probe: name the config to probe it with")
        if resume == "last":
            raise UserError("--resume takes the folder of a probe here, not last")
        demo = probe is None
        with Screen(quiet) as watching:
            watching.say("loading torch and the data ...")
            from slipstream.probing import probe as run_probe
            from slipstream.reporting import report

            found = run_probe(
                configs.demo("bars") if demo else config,
                configs.demo("regimes") if probe is None else probe,
                run=encoder,
                seeds=seeds,
                overrides=tuple(set_ or ()),
                label_overrides=tuple(probe_set or ()),
                watch=watching.show,
                folder=resume,
            )
            watching.say("drawing the report ...")
            path = report(found.run)
        _print_result(found.summary | {"report": str(path)}, as_json, quiet, screen.show_probe)


@app.command()
def tune(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo's search.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with a search's folder, or with the last: last."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A database that several workers share."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Processes that search; auto: one for each GPU."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray", help="Start the workers on a Ray cluster."),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for better settings, many trials at once, and train the best again."""
    with _answering(as_json):
        from slipstream import config as configs
        from slipstream import runs

        settings = None
        if config or not resume:
            settings = configs.load(config or configs.demo("search"), set_ or ())
        if resume == "last":
            asked = settings or configs.load({}, [t for t in set_ or () if t.startswith("out=")])
            resume = str(runs.last(asked.out, settings.name if settings else None))
        with screen.SearchScreen(quiet) as watching:
            watching.say("loading torch and the data ...")
            from slipstream.reporting import report
            from slipstream.tuning import tune as run_search

            found = run_search(
                settings,
                overrides=() if settings else tuple(set_ or ()),
                watch=watching.show,
                resume=resume,
                storage=storage,
                workers=_workers(workers),
                on=_cluster(on),
            )
            watching.say("drawing the report ...")
            path = report(found.run)
        _print_result(found.summary | {"report": str(path)}, as_json, quiet, screen.show_search)


def _workers(asked: str | None) -> int | Literal["auto"] | None:
    if asked is None:
        return None
    if asked == "auto":
        return "auto"
    if not asked.isdecimal():
        raise UserError(f"--workers is {asked}; give a number from 1, or auto")
    return int(asked)


def _cluster(asked: str | None) -> Literal["ray"] | None:
    if asked not in (None, "ray"):
        raise UserError(f"--on is {asked}; a search runs here, or on ray")
    return "ray" if asked else None


@app.command()
def evaluate(
    run: RunFolder,
    data: Annotated[Path | None, typer.Option("--data", help=DATA_HELP)] = None,
    on: Annotated[
        str, typer.Option(help="Which of the run's own sets: train, val, test.")
    ] = "test",
    resample: Resample = False,
    ensemble: Ensemble = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a trained model, on its own test set or on new data."""
    with _answering(as_json):
        from slipstream.evaluation import evaluate as run_evaluation

        overrides = tuple(set_ or ())
        found = run_evaluation(
            run, data, on=on, resample=resample, ensemble=ensemble, overrides=overrides
        )
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
    ensemble: Ensemble = None,
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
            overrides = tuple(set_ or ())
            table = run_prediction(
                run, data, every=every, resample=resample, ensemble=ensemble, overrides=overrides
            )
        write(table, out)
        found = {"run": str(run), "out": str(out), "rows": table.num_rows}
        found["model"] = table.schema.metadata[b"model"].decode()
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


@app.command()
def doctor(set_: Set = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Show what is here, try what works, say what is wrong and how to fix it."""
    with _answering(as_json):
        if set_:
            raise UserError("doctor looks at the machine; --set has nothing to change here")
        with Screen(quiet) as watching:
            watching.say("loading torch ...")
            from slipstream.doctor import examine

            found = examine(watching.say)
        _print_result(found, as_json, quiet, screen.show_doctor)


bench_app = typer.Typer(
    name="bench",
    help="Measure on this machine: what techniques bring, that accuracy held, how others do.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench_app)

Job = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A TOML file; without one, standard cases.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0.05, help="Time that it may take in all.", show_default=False)
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the results.", show_default="bench/<kind>-<time>")
]
Cases = Annotated[
    str, typer.Option(help="Some of the standard cases: A, B, C, D, GRU, MLP, Transformer.")
]


@bench_app.command()
def ladder(
    config: Job = None,
    cases: Cases = "",
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """From the naive loop upward, one technique added at a time."""
    names = [name.strip() for name in cases.split(",") if name.strip()]
    _bench("ladder", as_json, quiet, config, set_, cases=names, minutes=minutes, out=out)


@bench_app.command()
def parity(
    config: Job = None,
    seeds: Annotated[int, typer.Option(help="Seeds that both ways train with.")] = 3,
    margin: Annotated[float, typer.Option(help="Loss that is not one, in per cent.")] = 0.5,
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Whether auto is as accurate as the naive loop: whole trainings, seed by seed."""
    given = {"seeds": seeds, "margin": margin / 100, "minutes": minutes, "out": out}
    _bench("parity", as_json, quiet, config, set_, **given)


@bench_app.command()
def peers(
    config: Job = None,
    cases: Cases = "",
    jobs: Annotated[
        bool, typer.Option("--jobs/--no-jobs", help="Also whole jobs to a validation loss.")
    ] = True,
    minutes: Minutes = None,
    out: Out = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Beside Lightning and a plain PyTorch loop: the same work, step by step and as a whole."""
    names = [name.strip() for name in cases.split(",") if name.strip()]
    given = {"cases": names, "jobs": jobs, "minutes": minutes, "out": out}
    _bench("peers", as_json, quiet, config, set_, **given)


@bench_app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A folder of earlier results.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A folder of later ones.")],
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What moved beyond the spread from one result folder to another."""
    with _answering(as_json):
        from slipstream.bench import commands

        found = commands.compare(old, new, out=out)
        _print_result(found, as_json, quiet, screen.show_bench)


def _bench(
    what: str, as_json: bool, quiet: bool, config: Path | None, set_: Set, **given: Any
) -> None:
    with _answering(as_json):
        with screen.Meter(quiet) as meter:
            meter.say("loading torch and the data ...")
            from slipstream.bench import commands

            run = getattr(commands, what)
            given = {name: value for name, value in given.items() if value is not None}
            found = run(config, overrides=tuple(set_ or ()), watch=meter.show, **given)
        _print_result(found, as_json, quiet, screen.show_bench)


@app.command()
def profile(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the embedded demo's step.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, max=200, help="Steps to record.")] = 30,
    out: Annotated[
        Path | None, typer.Option(help="Where to make the folder.", show_default="profiles")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also a trace for TensorBoard.")
    ] = False,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say where a training step's time goes and what would help, tried where it can be."""
    with _answering(as_json), Screen(quiet) as watching:
        watching.say("loading torch and the data ...")
        from slipstream import config as configs
        from slipstream.profiling import profile as run_profile

        found = run_profile(
            config or configs.demo(),
            overrides=tuple(set_ or ()),
            steps=steps,
            out=out,
            tensorboard=tensorboard,
            tell=watching.say,
        )
        _print_result(found, as_json, quiet, screen.show_profile)


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
