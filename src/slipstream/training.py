"""From a config to a trained model and its figures."""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import torch
from safetensors import SafetensorError

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.engine import checkpoint, loop, measure, monitor, plan, recover, score, state
from slipstream.engine.checkpoint import Saved
from slipstream.engine.job import Task
from slipstream.engine.plan import Plan
from slipstream.engine.score import Baseline, Chunk
from slipstream.engine.state import Fit
from slipstream.errors import Interrupted, Resumable, UserError
from slipstream.models import build
from slipstream.runs import Event, Run

MAY_CHANGE = {
    *("name", "out", "data.path", "train.epochs", "train.patience", "train.minutes"),
    *("engine.device", "engine.log_every", "engine.checkpoint_minutes", "engine.plan"),
    *("engine.async_checkpoints", "engine.monitor"),
}
"""Settings that a resumed run may have otherwise than it began with"""


@dataclass(frozen=True)
class Result:
    """What a training run gave. `summary` is what `slipstream train --json` prints."""

    run: Path
    metrics: dict[str, dict[str, float]]
    """By set: mae, rmse, mse, r2, max_error, bias, in physical units."""
    baselines: dict[str, Any]
    """repeat, seasonal, ridge: the same figures, or None where one means nothing."""
    summary: dict[str, Any]


def train(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
) -> Result:
    """Train the model that `config` describes on its data, or on the given table.

    `watch` is shown every event of the run as it is logged. `resume` names a run to go on with,
    from its newest checkpoint, to the same end as if it had never stopped; `config` may then be
    left out. Other settings or other data are refused there unless `force` is given.
    """
    began = time.perf_counter()
    if resume is not None:
        earlier = runs.find(resume, watch)
        with runs.locked(earlier), _crashes_kept(earlier):
            source = config or earlier.folder / "config.toml"
            return _resumed(earlier, configs.load(source, overrides), data, force, began)
    if config is None:
        raise UserError("there is neither a config nor a run to resume")
    settings = configs.load(config, overrides)
    seconds: dict[str, float] = {}
    with _timed(seconds, "data"):
        dataset = datasets.load(settings, data)
    rules = _rules(settings, dataset)
    run = runs.create(settings.name, out=settings.out, watch=watch)
    with runs.locked(run), _crashes_kept(run):
        start = Start(dataset.fingerprint(), rules)
        return _run(run, settings, dataset, start, seconds, began)


def _resumed(run: Run, settings: Config, data: Any, force: bool, began: float) -> Result:
    was = configs.load(run.folder / "config.toml")
    changed = [name for name in configs.differences(was, settings) if name not in MAY_CHANGE]
    if changed and not force:
        raise UserError(
            f"{run.folder}: cannot go on with other settings than it began with "
            f"({', '.join(changed)}); start a new run, or pass --force"
        )
    saved, wrong = checkpoint.newest(run)
    at = state.progress_of(saved)
    if (run.folder / "metrics.json").exists() and at.epochs >= settings.train.epochs:
        raise UserError(
            f"{run.folder}: is finished, after {at.epochs} epochs; to train it further, raise "
            "train.epochs"
        )
    seconds: dict[str, float] = {}
    with _timed(seconds, "data"):
        dataset = datasets.load(settings, data)
    fingerprint = dataset.fingerprint()
    if fingerprint != saved.facts["data"] and not force:
        raise UserError(
            f"{run.folder}: the data are not those that it began with; start a new run, or pass "
            "--force"
        )
    then, now = Plan.from_dict(saved.facts["plan"]), _rules(settings, dataset)
    runs.cut_log(run, saved.facts["log_bytes"])
    for problem in wrong:
        run.append("fallback", what="an older checkpoint is used", why=problem)
    run.append("resume", step=at.step, epoch=at.epoch, differs=_what_differs(then, now, changed))
    keep = then.device == now.device and not changed
    start = Start(fingerprint, then if keep else now, settled=keep, saved=saved)
    return _run(run, settings, dataset, start, seconds, began)


def _rules(settings: Config, dataset: Dataset) -> Plan:
    streamed = dataset.stream is not None
    return plan.make(settings, data_bytes=dataset.data_bytes, streamed=streamed)


def _what_differs(then: Plan, now: Plan, changed: list[str]) -> str:
    """Why the resumed run will not be the unbroken one bit for bit; empty where it will."""
    told = [f"{name} was changed" for name in changed]
    if then.device.type != now.device.type:
        told.append(f"{now.device.type} instead of {then.device.type}")
    told += [
        f"{key} {now.hardware.get(key)} instead of {then.hardware.get(key)}"
        for key in ("gpu", "cpu", "torch")
        if then.hardware.get(key) != now.hardware.get(key)
    ]
    return "; ".join(told)


@contextmanager
def _crashes_kept(run: Run) -> Iterator[None]:
    """Leave the traceback of a fault of our own with the run, which can be resumed."""
    try:
        yield
    except (UserError, Interrupted, Resumable):
        raise
    except OSError as error:
        raise Resumable(
            f"the run had to stop: {error}; go on with: slipstream train --resume {run.folder}"
        ) from error
    except Exception:
        with suppress(OSError):
            runs.write_text(run.folder / "crash.txt", traceback.format_exc())
        raise


@dataclass(frozen=True)
class Start:
    """What a run begins or goes on with."""

    fingerprint: str
    plan: Plan
    settled: bool = False
    """Whether the plan is taken as it is, not as rules of thumb to measure from"""
    saved: Saved | None = None


def _run(
    run: Run,
    settings: Config,
    dataset: Dataset,
    start: Start,
    seconds: dict[str, float],
    began: float,
) -> Result:
    """Train, score and write everything."""
    with monitor.Monitor(run, start.plan.device, on=settings.engine.monitor) as watching:
        task, chosen = _prepared(run, settings, dataset, start, seconds)
        settings, model = task.config, task.model
        with chosen.flags():
            parameters = sum(p.numel() for p in model.parameters())
            _announce(task, chosen, parameters)
            fit = loop.fit(task, chosen, start.saved, watching)
            if not (run.folder / "config.toml").exists():  # the folder was removed under our feet
                run.folder.mkdir(parents=True, exist_ok=True)
                runs.write_text(run.folder / "config.toml", configs.to_toml(settings))
            seconds["set-up"] += fit.setup_s
            seconds |= {"training": fit.train_s, "validation": fit.validate_s}
            chosen = _as_it_ran(run, fit)
            if fit.weights:
                _keep_model(run, fit, dataset)
            if fit.signal_number:
                raise _interrupted(run, fit)
            with _timed(seconds, "scoring"):
                run.append("scoring", what="the model")
                model.load_state_dict(fit.weights)
                model.eval()
                scores = _score_model(task, chosen)
            with _timed(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                found = score.find_baselines(dataset, _pieces(task))
                beside = _score_baselines(found, task)
            if chosen.device.type == "cuda":
                recover.free_memory()
    logged = list(runs.events(run))
    judged_by = "mae" if settings.train.loss in ("mae", "quantile") else "mse"
    figures: dict[str, Any] = {
        "run": str(run.folder),
        "name": settings.name,
        "metrics": {which: scored["overall"] for which, scored in scores.items()},
        "scaled": {which: scored["scaled"] for which, scored in scores.items()},
        "windows": dataset.count,
        "baselines": beside,
        "judged_by": judged_by,
        "beaten_by": _beaten_by(scores["test"]["scaled"], beside, judged_by),
        "steps": fit.progress.step,
        "epochs": fit.progress.epoch,
        "best_epoch": fit.progress.best_epoch,
        "stopped": fit.stopped,
        "parameters": parameters,
        "windows_per_s": fit.progress.epoch * dataset.count["train"] / fit.train_s,
        "plan": chosen.to_dict(),
        "monitor": monitor.summarize(logged),
        "estimate": monitor.judge(logged, steps=fit.progress.step, took_s=fit.train_s),
        "notes": [
            *dataset.notes,
            *(f"no {name} baseline: {one.what}" for name, one in found.items() if not one.predict),
        ],
    }
    figures["seconds"] = time.perf_counter() - began
    figures["seconds_by_phase"] = seconds
    runs.write_json(run.folder / "metrics.json", figures | {"detail": scores})
    run.append("end", seconds=figures["seconds"])
    return Result(run.folder, figures["metrics"], beside, figures)


def _prepared(
    run: Run, settings: Config, dataset: Dataset, start: Start, seconds: dict[str, float]
) -> tuple[Task, Plan]:
    """The model and its data in place and the plan made, both written down."""
    chosen = start.plan
    with _seeded(settings.seed, chosen.device):
        model = build(settings.model, dataset.signature)
        with _timed(seconds, "set-up"):
            series = None if dataset.memory is None else dataset.memory.series
            if series is not None and chosen.home == "device":
                series = series.to(chosen.device)
            model.to(chosen.device)
        task = Task(settings, model, dataset, series, run, start.fingerprint)
        with _timed(seconds, "plan"):
            if not start.settled:
                task, chosen = _settle(task, chosen)
    runs.write_text(run.folder / "config.toml", configs.to_toml(task.config))
    runs.write_json(run.folder / "plan.json", chosen.to_dict())
    return task, chosen


def _keep_model(run: Run, fit: Fit, dataset: Dataset) -> None:
    """Write model/; where the run's folder takes nothing any more, into a folder elsewhere."""
    what = fit.weights, dataset.signature, dataset.scaler
    try:
        checkpoint.save_model(run, *what)
    except (OSError, SafetensorError) as error:
        aside = Run(Path(tempfile.mkdtemp(prefix=f"{run.folder.name}-")))
        checkpoint.save_model(aside, *what)
        raise Resumable(
            f"{run.folder}: cannot be written to any more ({error}); the best weights are in "
            f"{aside.model}; make room and go on with: slipstream train --resume {run.folder}"
        ) from None


def _settle(task: Task, chosen: Plan) -> tuple[Task, Plan]:
    """What was left to measuring: the batch, then the rest of the plan."""
    if task.config.train.batch == "auto":
        batch, evidence = measure.find_batch(task, chosen)
        train = task.config.train.model_copy(update={"batch": batch})
        task = replace(task, config=task.config.model_copy(update={"train": train}))
        told = f"{batch} windows: the most that fit and made training faster"
        chosen = replace(chosen, reasons=chosen.reasons | {"batch": told}, evidence=evidence)
    decided = measure.decide(task, chosen)
    return task, replace(decided, evidence=[*chosen.evidence, *decided.evidence])


def _announce(task: Task, chosen: Plan, parameters: int) -> None:
    train, dataset = task.config.train, task.dataset
    assert train.batch != "auto"
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=dataset.count,
        series=len(dataset.layout.series),
        parameters=parameters,
        epochs=train.epochs,
        steps_per_epoch=-(-dataset.count["train"] // (train.batch * train.accumulate)),
        plan=chosen.to_dict(),
        **measure.expected(task, chosen),
        notes=dataset.notes,
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - began


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Weights drawn from the seed; the caller's generators stay put."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _interrupted(run: Run, fit: Fit) -> Interrupted:
    at = fit.progress
    kept = f"the best weights, of epoch {at.best_epoch:g}, are in {run.model}"
    return Interrupted(
        f"stopped at step {at.step}, in epoch {math.ceil(at.epoch)}; "
        + (kept if fit.weights else "there was no validation yet")
        + f"; go on with: slipstream train --resume {run.folder}",
        signal_number=fit.signal_number,
    )


def _as_it_ran(run: Run, fit: Fit) -> Plan:
    """The plan, corrected where a fallback was taken."""
    ran = fit.plan
    if fit.failures:
        for name, why in fit.failures.items():
            run.append("fallback", what=f"{name} not captured", why=why)
        told = "; ".join(f"{name} ran eagerly: {why}" for name, why in fit.failures.items())
        ran = replace(ran, capture=False, reasons=ran.reasons | {"capture": told})
    runs.write_json(run.folder / "plan.json", ran.to_dict())
    return ran


def _pieces(task: Task, *, with_time: bool = False) -> score.Pieces:
    rows = task.config.engine.buffer_rows
    return lambda which: task.dataset.pieces(which, task.series, rows=rows, with_time=with_time)


def _score_model(task: Task, chosen: Plan) -> dict[str, Any]:
    dataset, predict = task.dataset, score.of_model(task.model, chosen)
    scores = {}
    for name in SETS:
        chunks = score.chunks(predict, _pieces(task, with_time=name == "test")(name))
        if name == "test":
            chunks = _written(chunks, dataset, task.run.folder / "predictions.parquet")
        scores[name] = score.tally(chunks, dataset, dataset.signature.quantiles)
    return scores


def _written(chunks: Iterator[Chunk], dataset: Dataset, path: Path) -> Iterator[Chunk]:
    """Pass the chunks on, and write each as it goes by."""
    writer: pa.parquet.ParquetWriter | None = None
    with runs.replacing(path) as temporary:
        try:
            for chunk in chunks:
                table = score.as_table(chunk, dataset)
                writer = writer or pa.parquet.ParquetWriter(temporary, table.schema)
                writer.write_table(table)
                yield chunk
        finally:
            if writer:
                writer.close()


def _score_baselines(found: dict[str, Baseline], task: Task) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, baseline in found.items():
        if baseline.predict is None:
            figures[name] = None
            continue
        by_set = {
            which: score.tally(
                score.chunks(baseline.predict, _pieces(task)(which)), task.dataset, ()
            )
            for which in SETS
        }
        figures[name] = {
            "what": baseline.what,
            "metrics": {which: scored["overall"] for which, scored in by_set.items()},
            "scaled": {which: scored["scaled"] for which, scored in by_set.items()},
            "mae_by_step": [row["mae"] for row in by_set["test"]["per_step"]],
        }
    return figures


def _beaten_by(model: dict[str, float], beside: dict[str, Any], kind: str) -> list[str]:
    """Baselines with a lower scaled test error than the model."""
    return [
        name
        for name, found in beside.items()
        if found is not None and found["scaled"]["test"][kind] < model[kind]
    ]
