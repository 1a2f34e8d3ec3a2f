"""The candidates of `slipstream auto`: a dozen strong and different configs, then changes of those
that work best.

Kinds and settings come from single experiments (dev/LOG.md); benchmarks/portfolio.py measures
recipes on many sets. Contexts, patches, batch sizes and epochs follow from the rows, the season and
the horizon.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch

from slipstream.config import Config, Range
from slipstream.config import search_space as spaces
from slipstream.config.model import SPECS
from slipstream.data.dataset import Dataset

Prefer = Literal["best", "fast", "small"]
Params = dict[str, Any]

SMALL_WIDTH = 32
"""The widest layer of a model for a microcontroller"""
MAX_STEPS, MIN_EPOCHS, MAX_EPOCHS = {"cuda": 2500, "cpu": 1500}, 6, 60
"""Updates of one candidate, roughly, and the bounds of its epochs"""
STEPS_PER_EPOCH = {"cuda": 48, "cpu": 32}
"""Updates of an epoch that the batch size aims at"""
GPU_FLOPS_PER_S = 2e13
"""The throughput of a candidate's training on a GPU, roughly"""


class KindCosts(NamedTuple):
    """What training a kind takes on a CPU."""

    efficiency: float
    """Its throughput as a share of that of a product of matrices"""
    step_s: float
    """Seconds of a step of one lane besides: those of its many small operations"""


CPU_COSTS = {
    "linear": KindCosts(0.3, 1.5e-3),
    "mlp": KindCosts(0.3, 2.5e-3),
    "nhits": KindCosts(0.2, 7e-3),
    "lstm": KindCosts(0.4, 3e-3),
    "gru": KindCosts(0.4, 4e-3),
    "tcn": KindCosts(0.12, 8e-3),
    "transformer": KindCosts(0.18, 9e-3),
}
"""Measured on two x86 cores with AVX-512; other kinds count as the last one"""
MIN_UPDATES = 100
"""A candidate that has fewer updates in its time comes after all others on a CPU"""
VALUE_S = 8e-9
"""Seconds per input value of a window on a CPU, which is gathered and normalized, roughly"""
TRIAL_SHARE = 0.12
"""The share of the whole time that one candidate may take with all its folds"""
PATIENCE = 6
MIN_SCALED, MAX_SIZE_RATIO = 5, 10.0
"""Series from which on each may have its own scale, and the ratio of the largest to the smallest
from which on each has one"""
MIN_CONTEXTS = 3
"""A context is at most this part of the training windows of a series"""
NAMES = (
    *("model.kind", "data.context", "model.normalize", "train.loss", "model.patch"),
    *("model.hidden", "model.layers", "model.dropout", "model.pool", "train.lr", "train.batch"),
    *("train.epochs", "train.weight_decay", "data.channels", "data.inputs"),
)
"""The settings that candidates differ in"""
LRS = {"transformer": 1e-3, "linear": 2e-3, "lstm": 2e-3, "gru": 2e-3}
DEFAULT_LR = 1e-3


@dataclass(frozen=True)
class Facts:
    """What the candidates depend on."""

    device: str
    windows: int
    """Training windows of the split"""
    contexts: tuple[int, ...]
    """The lengths of context that all data allow, the shortest first; the given one among them"""
    steps_out: int
    inputs: int
    targets: int
    is_forecast: bool
    """The targets' past is known, so that predictions can be relative to it"""
    classes: int
    minutes: float
    folds: int
    product_flops: float = 1e11
    """Operations a second of a product of matrices on this CPU"""
    own_inputs: tuple[str, ...] = ()
    """The targets and what is known ahead, which a forecast may be made from alone; empty where the
    given inputs are no others"""

    @classmethod
    def of(
        cls,
        config: Config,
        dataset: Dataset,
        contexts: Sequence[int],
        device: str,
        folds: int,
        product_flops: float,
        own_inputs: tuple[str, ...],
    ) -> Facts:
        signature = dataset.signature
        return cls(
            device=device,
            windows=dataset.num_windows["train"],
            contexts=tuple(sorted(contexts)),
            steps_out=signature.steps_out,
            inputs=len(signature.inputs),
            targets=len(signature.targets),
            is_forecast=bool(signature.horizon and signature.shared and not signature.classes),
            classes=len(signature.classes),
            minutes=config.tune.minutes or 5.0,
            folds=folds,
            product_flops=product_flops,
            own_inputs=own_inputs,
        )

    @property
    def own_param(self) -> str:
        """`own_inputs` as a study holds them"""
        return str(to_param(self.own_inputs))


def to_param(inputs: tuple[str, ...] | None) -> Any:
    """Return `data.inputs` as a study holds it."""
    (param,) = spaces.to_params([inputs])
    return param


def list_own_inputs(dataset: Dataset) -> tuple[str, ...]:
    """Return the inputs that are targets or known ahead, in their order; none where there are no
    others."""
    signature = dataset.signature
    if not signature.horizon or signature.classes or signature.shared < len(signature.targets):
        return ()
    own = {*signature.targets, *signature.future}
    kept = tuple(name for name in signature.inputs if name in own)
    return kept if len(kept) < len(signature.inputs) else ()


def list_contexts(config: Config, dataset: Dataset) -> list[int]:
    """Return the lengths of context to try, besides the given one."""
    data, season = config.data, dataset.period
    given = int(data.context)
    signature = dataset.signature
    if signature.classes and not signature.horizon and dataset.num_windows["train"] < 100_000:
        longer: list[int] = []  # a window is what is classified
        return longer
    if _divides_series(dataset):  # a longer context has fewer windows
        return [length for length in (given // 2, given // 4) if length >= 16]
    horizon = max(data.horizon, 1)
    if not data.horizon:
        wanted = [given // 2, 2 * given, 4 * given]
    else:
        week = 14 * season if season else 4 * horizon
        middle = max(min(week, 512), 2 * horizon, 16)
        wanted = [max(horizon, season or 0, 16), middle // 2, middle, 2 * middle]
    num_series = max(len(dataset.index.series_names), 1)
    limit = dataset.num_windows["train"] / num_series / MIN_CONTEXTS
    rounded = {_round(length, season) for length in wanted if 8 <= length <= limit}
    return sorted(rounded - {given})


def _divides_series(dataset: Dataset) -> bool:
    """Whether the split divides whole series, not the rows of each."""
    memory = dataset.memory
    if memory is None:
        return False
    sets = (memory.series.find_series(memory.starts[name]).unique() for name in ("train", "val"))
    trained, validated = sets
    return not bool(torch.isin(trained, validated).any())


def should_scale_series(config: Config, dataset: Dataset) -> bool:
    """Whether each series is better scaled by itself: of many series whose sizes differ, the
    largest alone would count."""
    data, signature = config.data, dataset.signature
    if "scale_by" in data.model_fields_set or not data.horizon or signature.classes:
        return False
    memory = dataset.memory
    if memory is None or len(dataset.index.series_names) < MIN_SCALED or not signature.shared:
        return False
    series = memory.series
    owners = series.find_series(torch.arange(len(series.values)))
    targets = series.targets.double().nan_to_num()
    count = torch.bincount(owners).clamp(min=1)[:, None]
    sums = torch.zeros(2, len(count), targets.shape[1], dtype=torch.float64)
    sums[0].index_add_(0, owners, targets)
    sums[1].index_add_(0, owners, targets.square())
    mean, square = sums / count
    sizes = (square - mean.square()).clamp(min=0.0).sqrt().amax(dim=1)
    sizes = sizes[sizes > 0].sort().values
    if len(sizes) < MIN_SCALED:
        return False
    low, high = sizes[len(sizes) // 20], sizes[-1 - len(sizes) // 20]
    return bool(high > MAX_SIZE_RATIO * low)


def is_scaled_by_series(config: Config) -> bool:
    """Whether a config forecasts numbers of series that are each scaled by itself."""
    data = config.data
    return data.scale_by == "series" and bool(data.horizon) and data.task == "regress"


def _round(length: int, season: int | None) -> int:
    """Return a length that patches divide; a whole number of seasons where it has several."""
    if season is not None and season % 4 == 0 and length >= 2 * season:
        return length // season * season
    step = 16 if length >= 64 else 8 if length >= 32 else 4
    return max(length // step * step, step)


def choose_patch(context: int, wanted: int) -> int:
    """Return the rows of a patch: the largest divisor of the context up to `wanted`."""
    return max(size for size in range(1, wanted + 1) if context % size == 0)


def reads_own(params: Mapping[str, Any], facts: Facts) -> bool:
    """Whether a candidate reads the targets and what is known ahead alone."""
    return bool(facts.own_inputs) and params["data.inputs"] == facts.own_param


def estimate_epoch_s(params: Params, facts: Facts) -> float:
    """Return the seconds of an epoch over the training windows of all folds, roughly."""
    flops = count_flops(params, facts)
    if facts.device == "cuda":
        return facts.folds * flops / GPU_FLOPS_PER_S
    costs = CPU_COSTS.get(params["model.kind"], CPU_COSTS["transformer"])
    values = params["data.context"] * _count_inputs(params, facts) * facts.windows
    compute_s = flops / (costs.efficiency * facts.product_flops)
    steps_s = costs.step_s * count_updates(params, facts, epochs=1)
    return float(facts.folds * (compute_s + steps_s + VALUE_S * values))


def count_updates(params: Params, facts: Facts, *, epochs: int | None = None) -> int:
    """Return the updates of a candidate, or of so many epochs."""
    epochs = params["train.epochs"] if epochs is None else epochs
    return -(-facts.windows // int(params["train.batch"])) * int(epochs)


def _count_inputs(params: Params, facts: Facts) -> int:
    return len(facts.own_inputs) if reads_own(params, facts) else facts.inputs


def count_flops(params: Params, facts: Facts) -> float:
    """Return the operations of one pass over the training windows, roughly."""
    context, hidden, layers = params["data.context"], params["model.hidden"], params["model.layers"]
    independent = params["data.channels"] == "independent"
    inputs = _count_inputs(params, facts)
    sequences, inputs = (facts.targets, inputs - facts.targets + 1) if independent else (1, inputs)
    outputs = facts.steps_out * (1 if independent else facts.targets) * max(facts.classes, 1)
    tokens = context / params["model.patch"]
    match params["model.kind"]:
        case "linear":
            size = context * inputs * outputs
        case "transformer":
            size = tokens * layers * (12 * hidden**2 + 2 * tokens * hidden) + hidden * outputs
        case "lstm" | "gru":
            size = tokens * layers * 8 * hidden**2 + hidden * outputs
        case "tcn":
            size = tokens * layers * 6 * hidden**2 + hidden * outputs
        case _:
            size = context * inputs * hidden + layers * hidden**2 + hidden * outputs
    return float(6 * size * sequences * facts.windows)


def make_candidates(config: Config, facts: Facts, prefer: Prefer) -> list[Params]:
    """Return the portfolio, the most promising and the cheapest first."""
    if facts.classes:
        rows = _list_classifiers(facts)
    elif facts.is_forecast:
        rows = _list_forecasters(config, facts)
    else:
        rows = _list_estimators(config, facts)
    if prefer == "small":
        rows = [_shrink(row) for row in rows if row["model.kind"] != "transformer"]
    candidates: list[Params] = []
    for row in rows:
        params = complete_params(row, config, facts)
        if params["model.kind"] in SPECS and params not in candidates:
            candidates.append(params)
    if facts.device == "cpu":
        candidates = [params for params in candidates if not _is_solved(params)]
        candidates.sort(
            key=lambda params: (
                count_updates(params, facts) < MIN_UPDATES,
                estimate_training_s(params, facts),
            )
        )
    return candidates


def _is_solved(params: Params) -> bool:
    """Whether a baseline is this model, solved in closed form: a ridge, a logistic regression."""
    is_plain = params["train.loss"] == "mse" and params["model.normalize"] != "window"
    return bool(params["model.kind"] == "linear" and is_plain)


def estimate_training_s(params: Params, facts: Facts) -> float:
    """Return the seconds of training a candidate, roughly."""
    return float(params["train.epochs"] * estimate_epoch_s(params, facts))


def order_candidates(
    candidates: Sequence[Params], facts: Facts, prefers_own: bool | None
) -> Sequence[Params]:
    """Return the candidates in the order to try: on a CPU, two with the inputs that baselines have
    shown to be better for each one with the others."""
    if facts.device != "cpu" or prefers_own is None:
        return candidates
    places: list[tuple[float, int]] = []
    counts = {True: 0, False: 0}
    for number, params in enumerate(candidates):
        is_preferred = reads_own(params, facts) == prefers_own
        counts[is_preferred] += 1
        places.append((counts[is_preferred] / (2 if is_preferred else 1), number))
    return [candidates[number] for _, number in sorted(places)]


def lengthen_context(params: Params, context: int, facts: Facts) -> Params:
    """Return a candidate that reads so many rows, unless it reads the fewest of all candidates, for
    which the newest rows are enough."""
    if not facts.contexts[0] < params["data.context"] < context:
        return params
    patch = params["model.patch"]
    longer = {"data.context": context, "model.patch": choose_patch(context, patch)}
    return params | longer | {"train.epochs": count_epochs(params | longer, facts)}


def _shrink(row: Params) -> Params:
    return row | {"model.hidden": min(row["model.hidden"], SMALL_WIDTH), "model.layers": 1}


def _make(kind: str, context: int, **values: Any) -> Params:
    names = {name.rpartition(".")[2]: name for name in NAMES}
    return {"model.kind": kind, "data.context": context} | {
        names[name]: value for name, value in values.items()
    }


def _list_forecasters(config: Config, facts: Facts) -> list[Params]:
    contexts = facts.contexts
    short, long = contexts[0], contexts[-1]
    middle = contexts[len(contexts) // 2]
    free = config.train.loss != "quantile"
    mse, mae, huber = ("mse", "mae", "huber") if free else ("quantile",) * 3
    wide = 128 if facts.windows > 5_000 else 64
    apart: Params = {"channels": "together" if facts.targets == 1 else "independent"}
    flat: Params = {"pool": "flatten", **apart}
    rows = [
        _make("linear", middle, normalize="last", loss=mae, hidden=64, **apart),
        _make("mlp", middle, normalize="last", loss=mse, hidden=256, dropout=0.2, **apart),
        _make("transformer", middle, normalize="last", loss=mse, hidden=64, dropout=0.2, **flat),
        _make("nhits", middle, normalize="window", loss=mae, hidden=256, **apart),
        _make("gru", short, normalize="last", loss=mse, hidden=128, layers=1, patch=1),
        _make(
            "transformer", middle, normalize="window", loss=mae, hidden=wide, dropout=0.2, **flat
        ),
        _make("lstm", middle, normalize="last", loss=mse, hidden=128, layers=1, **flat),
        _make("mlp", middle, normalize="window", loss=mae, hidden=512, dropout=0.3, **apart),
        _make("gru", middle, normalize="window", loss=huber, hidden=128, layers=1, **flat),
        _make("tcn", middle, normalize="last", loss=huber, hidden=64, layers=3, **flat),
        _make("nhits", long, normalize="last", loss=mse, hidden=256, **apart),
        _make("linear", long, normalize="window", loss=mse, hidden=64, **apart),
        _make("transformer", long, normalize="last", loss=huber, hidden=64, dropout=0.3, **flat),
        _make("mlp", short, normalize="last", loss=huber, hidden=256, dropout=0.3),
    ]
    if facts.inputs == facts.targets:
        return rows
    # columns that are no targets say more than the level of a window does
    joint = [
        _make("lstm", short, normalize="none", loss=mse, hidden=128, layers=2, patch=1),
        _make("mlp", short, normalize="none", loss=mse, hidden=256, dropout=0.3),
        _make("mlp", middle, normalize="last", loss=mse, hidden=256, dropout=0.2, **apart),
        _make("tcn", short, normalize="none", loss=mae, hidden=64, layers=4, patch=1),
        _make("transformer", middle, normalize="last", loss=mse, hidden=64, dropout=0.2, **flat),
        _make("lstm", middle, normalize="none", loss=mae, hidden=128, layers=1, patch=8),
        _make("gru", short, normalize="none", loss=mse, hidden=128, layers=1, patch=1),
        _make("nhits", middle, normalize="window", loss=mae, hidden=256, **apart),
        _make("mlp", short, normalize="none", loss=huber, hidden=256, dropout=0.3),
        _make("linear", middle, normalize="last", loss=mae, hidden=64, **apart),
    ]
    if not facts.own_inputs:
        return [*joint, *rows]
    own = [row | {"data.inputs": facts.own_param} for row in rows]
    return [row for pair in zip_longest(own, joint) for row in pair if row is not None]


def _list_estimators(config: Config, facts: Facts) -> list[Params]:
    contexts = facts.contexts
    long, short = contexts[-1], contexts[0]
    free = config.train.loss != "quantile"
    mse, mae = ("mse", "mae") if free else ("quantile",) * 2
    common: Params = {"normalize": "none"}
    return [
        _make("mlp", long, loss=mse, hidden=256, dropout=0.1, **common),
        _make("lstm", long, loss=mae, hidden=64, layers=1, dropout=0.0, **common),
        _make("gru", long, loss=mae, hidden=64, layers=1, dropout=0.0, **common),
        _make("lstm", long, loss=mse, hidden=128, layers=1, dropout=0.0, **common),
        _make("tcn", long, loss=mae, hidden=64, layers=3, dropout=0.1, **common),
        _make("transformer", long, loss=mse, hidden=64, dropout=0.1, pool="mean", **common),
        _make("lstm", short, loss=mae, hidden=64, layers=2, dropout=0.1, **common),
        _make("gru", short, loss=mse, hidden=128, layers=1, dropout=0.0, **common),
        _make("mlp", short, loss=mae, hidden=256, layers=3, dropout=0.1, **common),
        _make("nhits", long, loss=mae, hidden=128, **common),
        _make("lstm", long, loss=mae, hidden=32, layers=1, dropout=0.0, lr=5e-3, **common),
        _make("linear", long, loss=mse, hidden=64, **common),
    ]


def _list_classifiers(facts: Facts) -> list[Params]:
    context = facts.contexts[-1]
    few = facts.windows < 500
    drop = 0.3 if few else 0.1
    hidden = 64 if few else 128
    return [
        _make("mlp", context, hidden=256, dropout=drop, normalize="none"),
        _make("tcn", context, hidden=hidden, layers=4, dropout=drop, pool="mean", patch=1),
        _make("lstm", context, hidden=hidden, layers=1, dropout=drop, pool="mean", patch=4),
        _make("gru", context, hidden=hidden, layers=1, dropout=drop, pool="last", patch=4),
        _make("transformer", context, hidden=64, dropout=drop, pool="mean", patch=8),
        _make("tcn", context, hidden=hidden, layers=4, dropout=drop, pool="mean", patch=1, lr=3e-3),
        _make("mlp", context, hidden=512, dropout=0.5, normalize="window"),
        _make(
            "tcn",
            context,
            hidden=32,
            layers=5,
            dropout=drop,
            pool="mean",
            normalize="window",
            patch=1,
        ),
        _make("linear", context, hidden=64, normalize="none"),
        _make("gru", context, hidden=128, layers=2, dropout=0.3, pool="mean", patch=2),
        _make("transformer", context, hidden=128, dropout=0.3, pool="mean", patch=4),
        _make("lstm", context, hidden=128, layers=2, dropout=0.3, pool="attention", patch=2),
    ]


def complete_params(row: Params, config: Config, facts: Facts) -> Params:
    """Return all settings of a candidate: what is not given follows from the others."""
    kind, context = row["model.kind"], row["data.context"]
    sequential = kind in SPECS and SPECS[kind].is_sequential
    wanted = row.get("model.patch", 16 if facts.is_forecast else 10)
    patch = choose_patch(context, wanted) if sequential and context >= 32 else 1
    channels = row.get("data.channels", "together")
    steps = STEPS_PER_EPOCH[facts.device]
    batch = 2 ** round(math.log2(max(facts.windows / steps, 1)))
    batch = min(max(batch, 8 if facts.windows < 1_000 else 32), 512)
    params: Params = {
        "model.kind": kind,
        "data.context": context,
        "model.normalize": row.get("model.normalize", "none"),
        "train.loss": row.get("train.loss", config.train.loss),
        "model.patch": patch,
        "model.hidden": row.get("model.hidden", 128),
        "model.layers": row.get("model.layers", 2),
        "model.dropout": row.get("model.dropout", 0.1),
        "model.pool": row.get("model.pool", "last") if sequential else "last",
        "train.lr": row.get("train.lr", LRS.get(kind, DEFAULT_LR)),
        "train.batch": row.get("train.batch", batch),
        "train.weight_decay": row.get("train.weight_decay", 1e-4),
        "data.channels": channels,
        "data.inputs": row.get("data.inputs", to_param(config.data.inputs)),
    }
    return params | {"train.epochs": row.get("train.epochs", count_epochs(params, facts))}


def count_epochs(params: Params, facts: Facts) -> int:
    """Return the epochs of a candidate: as many as its updates need, within its time."""
    steps = count_updates(params, facts, epochs=1)
    wanted = min(max(round(MAX_STEPS[facts.device] / steps), MIN_EPOCHS), MAX_EPOCHS)
    epoch_s = estimate_epoch_s(params, facts)
    fitting: float = TRIAL_SHARE * 60 * facts.minutes / max(epoch_s, 1e-9)
    return max(min(wanted, int(fitting)), 1)


def make_space(given: Params, candidates: Sequence[Params], facts: Facts) -> dict[str, Any]:
    """Return the space that has the given config, the portfolio and everything near them."""
    ranges: dict[str, Any] = {
        "train.lr": Range(low=1e-5, high=1e-1, log=True),
        "train.weight_decay": Range(low=1e-7, high=1.0, log=True),
        "model.dropout": Range(low=0.0, high=0.9),
        "train.epochs": Range(low=1, high=100_000),
    }
    further: dict[str, tuple[Any, ...]] = {
        "model.hidden": (16, 32, 64, 128, 256, 512),
        "model.layers": (1, 2, 3, 4, 5),
        "model.pool": ("last", "mean", "flatten"),
        "data.context": facts.contexts,
        "train.batch": (8, 16, 32, 64, 128, 256, 512, 1024),
        "model.patch": tuple(
            {
                choose_patch(length, size)
                for length in facts.contexts
                for size in (1, 2, 4, 8, 10, 16)
            }
        ),
    }
    space: dict[str, Any] = {}
    for name in NAMES:
        if name in ranges:
            space[name] = ranges[name]
            continue
        if name == "data.inputs":  # a list, which the study holds as text
            if facts.own_inputs:
                space[name] = (tuple(json.loads(given[name])), facts.own_inputs)
            continue
        values = {given[name], *(row[name] for row in candidates), *further.get(name, ())}
        if len(values) > 1:
            space[name] = tuple(sorted(values, key=str))
    return space


def read_given(config: Config) -> Params:
    """Return the settings of a config by the names that candidates have."""
    values = {}
    for name in NAMES:
        section, _, key = name.partition(".")
        values[name] = getattr(getattr(config, section), key)
    return values | {"data.inputs": to_param(config.data.inputs)}


def change_params(
    parent: Mapping[str, Any],
    facts: Facts,
    config: Config,
    generator: random.Random,
    prefer: Prefer,
) -> Params:
    """Return a candidate near another one: one to three of its settings change."""
    params = dict(parent)
    kind = params["model.kind"]
    spec = SPECS.get(kind)
    changes = ["train.lr", "train.weight_decay", "train.batch"]
    if spec is not None and spec.has_hidden:
        changes += ["model.hidden", "model.dropout", "model.dropout", "model.layers"]
    if len(facts.contexts) > 1:
        changes += ["data.context"]
    if spec is not None and spec.is_sequential:
        changes += ["model.patch", "model.pool"]
    if facts.is_forecast:
        changes += ["model.normalize"]
        if facts.own_inputs:
            changes += ["data.inputs"]
        if facts.inputs > 1:
            changes += ["data.channels"]
    if not facts.classes and config.train.loss != "quantile":
        changes += ["train.loss"]
    for name in generator.sample(changes, generator.choice((1, 2, 2, 3))):
        if name == "data.inputs":
            given = to_param(config.data.inputs)
            params[name] = given if reads_own(params, facts) else facts.own_param
        else:
            params[name] = _change(name, params, facts, generator, prefer)
    if reads_own(params, facts) and params["model.normalize"] == "none":
        params["model.normalize"] = "last"  # nothing else tells the level of a window
    if params["data.context"] % params["model.patch"]:
        params["model.patch"] = choose_patch(params["data.context"], 16)
    if kind == "transformer" and params["model.hidden"] % config.model.heads:
        params["model.hidden"] = parent["model.hidden"]
    return params | {"train.epochs": count_epochs(params, facts)}


def _change(
    name: str, params: Params, facts: Facts, generator: random.Random, prefer: Prefer
) -> Any:
    value = params[name]
    match name:
        case "train.lr":
            return min(max(value * math.exp(generator.gauss(0.0, 0.7)), 1e-5), 1e-1)
        case "train.weight_decay":
            return generator.choice((1e-6, 1e-4, 1e-3, 1e-2, 1e-1))
        case "model.dropout":
            return round(min(max(value + generator.choice((-0.2, -0.1, 0.1, 0.2)), 0.0), 0.7), 2)
        case "model.hidden":
            most = SMALL_WIDTH if prefer == "small" else 512
            return min(max(int(value * generator.choice((0.5, 2))), 16), most)
        case "model.layers":
            return 1 if prefer == "small" else min(max(value + generator.choice((-1, 1)), 1), 5)
        case "train.batch":
            return min(max(int(value * generator.choice((0.5, 2))), 8), 1024)
        case "data.context":
            return generator.choice(facts.contexts)
        case "model.patch":
            return choose_patch(params["data.context"], generator.choice((1, 4, 8, 10, 16)))
        case "model.pool":
            return generator.choice(("last", "mean", "flatten"))
        case "model.normalize":
            return generator.choice(("last", "window"))
        case "data.channels":
            return "together" if value == "independent" else "independent"
        case "train.loss":
            return generator.choice(("mse", "mae", "huber"))
    raise AssertionError(name)


def is_in_space(params: Mapping[str, Any], space: Mapping[str, Any]) -> bool:
    """Whether every setting is a value of the space."""
    for name, entry in space.items():
        if isinstance(entry, Range):
            if not entry.low <= params[name] <= entry.high:
                return False
        elif params[name] not in spaces.to_params(entry):
            return False
    return True
