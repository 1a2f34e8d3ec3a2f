"""Score a trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.autotune.rules import make_plan
from slipstream.config import Config, Signature
from slipstream.data import dataset as datasets
from slipstream.data import new_data
from slipstream.data.dataset import Dataset
from slipstream.data.scaler import Scaler
from slipstream.data.splits import SETS
from slipstream.engine import checkpoint, recovery
from slipstream.errors import UserError
from slipstream.models import permission
from slipstream.runs import Run
from slipstream.scoring.batch import PredictionBatch
from slipstream.scoring.ensemble import CoverageCounter, compute_coverage, load_predictors
from slipstream.scoring.predict import accumulate, predict_batches


@recovery.explain_out_of_memory()
def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    on: str = "test",
    resample: bool = False,
    ensemble: bool | None = None,
    overrides: tuple[str, ...] = (),
    allow_code: bool = False,
) -> dict[str, Any]:
    """Compute the metrics of a run's model on one of its own sets or on new data.

    Args:
        run: The run folder. For a search, the model of its best settings is used.
        data: A path or a table to score instead; every window of it counts.
        on: The set of the run's own data: "train", "val" or "test". In a walk-forward run, each
            fold is scored by its own model.
        resample: Resample new data to the time step that the model was trained on.
        ensemble: True for the mean of all repeats, False for the single model; by default whichever
            was better on the validation set.
        overrides: Settings that override the run's config.
        allow_code: Let the run's config import the network class that it names.

    Returns:
        A dict with `metrics` (physical units), `scaled`, `windows`, `detail` (per target, series
        and predicted row), `model`, `coverage` of the intervals, and `notes`.

    Raises:
        UserError: The run or the data cannot be used; the message names the fix.

    Example:
        slipstream.evaluate("runs/job-20260131T120000Z", "new.csv")["metrics"]["mae"]
    """
    if on not in SETS:
        raise UserError(f'there is no set "{on}"; choose one of {", ".join(SETS)}')
    model_run, owner = runs.find_model_run(runs.open_run(run))
    config = checkpoint.load_run_config(model_run, overrides)
    plan = make_plan(config, data_bytes=0, training=False)
    permission.require_permission(model_run.folder, overrides=overrides, allow_code=allow_code)
    trained = load_predictors(model_run, config, plan, ensemble=ensemble)
    signature, scaler = trained.signature, trained.scaler
    if data is None:
        dataset, which = _load_own_data(model_run, config, signature, scaler), on
    else:
        dataset = new_data.load_new_data(
            config, signature, scaler, data, targets=True, resample=resample
        )
        which = "all"
    if len(dataset.folds) > len(trained.folds):
        raise UserError(
            f"{model_run.folder}: holds the model of one fold; set tune.retrain to have them all, "
            "or pass data with --data"
        )
    folds = [dataset.select_fold(fold) for fold in dataset.folds] or [dataset]
    predictors = trained.folds if dataset.folds else trained.folds[-1:]
    coverage = [CoverageCounter(one.half_widths or {}, signature.quantiles) for one in predictors]
    with plan.flags():
        memory = dataset.memory
        series = None if memory is None else memory.series.to(plan.device)

        def predict_folds() -> Iterator[PredictionBatch]:
            for fold, predictor, counter in zip(folds, predictors, coverage, strict=True):
                chunks = fold.iter_chunks(which, series, rows=config.engine.buffer_rows)
                for batch in predict_batches(predictor.predict, chunks):
                    counter.add(batch)
                    yield batch

        scores = accumulate(predict_folds(), dataset).compute()
    model = trained.describe_on_new_data()
    if dataset.folds:
        model = f"{trained.description}, fold by fold"
    return {
        "run": str(model_run.folder),
        "on": on if data is None else "data",
        "model": f"{owner}: {model}" if owner else model,
        "metrics": scores["overall"],
        **({"scaled": scores["scaled"]} if "scaled" in scores else {}),
        **({"classes": list(signature.classes)} if signature.classes else {}),
        "coverage": compute_coverage(coverage) or None,
        "windows": sum(fold.num_windows[which] for fold in folds),
        "detail": scores,
        "plan": plan.to_dict(),
        "notes": list(dataset.notes),
    }


def _load_own_data(run: Run, config: Config, signature: Signature, scaler: Scaler) -> Dataset:
    """Load the run's data; refuse data that the model's scaler or classes do not fit any more."""
    # a run that started from an encoder has the encoder's scaler, which is not fitted again
    known = scaler.select(signature.inputs) if config.train.init_from else None
    dataset = datasets.load_dataset(config, known=known)
    if dataset.signature.classes != signature.classes:
        raise UserError(
            "the data of this run have changed since training: the classes now are "
            f"{', '.join(dataset.signature.classes[:20])}, then "
            f"{', '.join(signature.classes[:20])}; to score the model on them as new data, pass "
            "them with --data"
        )
    for name, shift in scaler.shift.items():
        now = dataset.scaler.shift.get(name, math.nan), dataset.scaler.size.get(name, math.nan)
        was = shift, scaler.size[name]
        if not all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6 * scaler.size[name])
            for a, b in zip(now, was, strict=True)
        ):
            raise UserError(
                f'the data of this run have changed since training: column "{name}" now has '
                f"centre {now[0]:g} and size {now[1]:g}, then {was[0]:g} and {was[1]:g}; to score "
                "the model on them as new data, pass them with --data"
            )
    if _has_changed(run, config, dataset):
        note = (
            "the data of this run have changed since training, though its inputs are scaled as "
            "they were; these metrics are of the data as they are now"
        )
        return replace(dataset, notes=(*dataset.notes, note))
    return dataset


def _has_changed(run: Run, config: Config, dataset: Dataset) -> bool:
    """Say whether the data's fingerprint differs from that of training, if the two are comparable:
    other windows have another fingerprint, and so has the same data when it is streamed."""
    origin = checkpoint.read_origin(run)
    changed = configs.list_differences(checkpoint.load_run_config(run), config)
    same_windows = not any(
        name.startswith("data.") and name not in ("data.path", "data.labels") for name in changed
    )
    same_kind = origin.get("streamed") == (dataset.stream is not None)
    return same_windows and same_kind and origin["data"] != dataset.compute_fingerprint()
