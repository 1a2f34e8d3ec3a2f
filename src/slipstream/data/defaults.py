"""Settings that are left out, or "auto": resolved from the data, each with its reason.

`resolve` is called once, before anything else reads the config. What follows, the run's folder
included, has numbers and names only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.text import format_count
from slipstream.config import ALL_ROWS, Config, Range, Train, replace_settings
from slipstream.config.base import AUTO, Section, list_from_data
from slipstream.config.model import SPECS
from slipstream.config.prepare import PadStep
from slipstream.data import splits
from slipstream.data.loading import (
    DEFAULT_SPLIT,
    load_series,
    read_source,
    refuse_undecided,
    resolve_context,
    should_stream,
)
from slipstream.data.series import Flags, Floats, Ints, SeriesIndex

PATCHES = (16, 12, 8, 6, 5, 4, 3, 2)
MIN_TOKENS = 10
"""Tokens that patches leave of a context"""
MULTIPLE = 8
"""Longer contexts are multiples of it, so that patches fit"""
MIN_PATCHED = 48
"""Rows of the shortest context that is cut into patches"""
MAX_WHOLE_PATCH = 8
"""The longest patch of windows that are whole series"""
HORIZONS = 3.5
"""The context of a forecast, in horizons, where no season needs more"""
SEASONS = {7: 8, 12: 3, 4: 6, 52: 2}
"""The context of a forecast in seasons, by the rows of a season: 8 weeks of days, 3 years of
months, 6 of quarters, 2 of weeks; of shorter steps, a week"""
DAYS = 7
USUAL_CONTEXT, MAX_CONTEXT = 96, 512
LONG_SHARE = 0.4
"""Share of the training rows of a usual series that a context may take"""
SHORT_SHARE = 0.1
"""Share of the rows that may be lost in pieces shorter than a window"""
MAX_ROWS = 2**62
MAX_DRIFT = 0.8
"""The drift up to which forecasts are relative to the last row"""
NUM_STEPS = 7
"""Steps ahead at which drift is measured: not all multiples of a season"""
MAX_DRIFT_WINDOWS, GOLDEN_RATIO = 1_000_000, (5**0.5 - 1) / 2
"""Windows and rows that drift is measured in; of more, so many that are spread over all"""
MIN_STEPS = 32
"""Steps of an epoch, where there are enough windows"""
MIN_BATCH, MAX_BATCH = 16, 256
MIN_UPDATES, MAX_EPOCHS = 1_600, 300
"""Steps of a training, where early stopping allows them, and the epochs that these may take"""
MIN_PATIENCE, MAX_PATIENCE = 320, 60
"""Steps without an improvement before early stopping, and the validations that these may take"""
PATCHED_LR = 2e-3


@dataclass(frozen=True)
class SeriesFacts:
    """What the rules need to know of the series."""

    lengths: Ints
    """Rows of each series"""
    pieces: Ints
    """Rows of each piece of a series between gaps"""
    training_rows: Ints
    """Training rows of each series that has some"""
    period: int | None
    """Rows of one season, where known"""
    drift: float
    """The error of a forecast that repeats the last row, relative to one that repeats the mean of
    the context: small where values wander, as prices do"""


@dataclass(frozen=True)
class DataFacts:
    """What the rules need to know of a table."""

    num_inputs: int
    """Without those that are known ahead"""
    num_targets: int
    num_shared: int
    """Targets that are inputs as well"""
    has_static: bool
    series: SeriesFacts | None = None
    """None where rows stay on disk"""


NO_FACTS = DataFacts(num_inputs=0, num_targets=0, num_shared=0, has_static=False)


class Choice(NamedTuple):
    """The value of a setting, and why it was chosen."""

    value: Any
    reason: str


class ResolvedConfig(NamedTuple):
    """A config without settings to resolve."""

    config: Config
    choices: dict[str, Choice]
    """What was resolved, by the settings' dotted names"""


def to_plain(choices: Mapping[str, Choice]) -> dict[str, dict[str, Any]]:
    """Return the choices as a plan has them."""
    return {name: choice._asdict() for name, choice in choices.items()}


def resolve(config: Config, table: Any = None, *, measures: bool = True) -> ResolvedConfig:
    """Resolve what is left out, or "auto", from the data of a config, or from the table passed
    instead. `data.context` is a number of rows afterwards, also where it was "all".

    `train.batch = "auto"` stays where the batch is measured, as for training; where nothing
    `measures` it, it is resolved by rule.
    """
    if config.train.batch == AUTO and not measures:
        train = config.train.model_dump(exclude_unset=True, exclude={"batch"})
        config = config.model_copy(update={"train": Train.model_validate(train)})
    resolved = resolve_auto(config, read_facts(config, table) if _needs_data(config) else NO_FACTS)
    return resolved._replace(config=resolve_context(resolved.config, table))


def keep_resolved(config: Config, was: Config, table: Any = None) -> Config:
    """Return a config whose settings to resolve are those of the run that it resumes, a batch that
    was measured included."""
    names = list_unset(config) + ["train.batch"] * (config.train.batch == AUTO)
    values: dict[str, Any] = {}
    for name in names:
        section, key = name.split(".")
        values[name] = getattr(getattr(was, section), key)
    if "data.context" in values and _reads_whole_series(config):
        values["data.context"] = "all"  # which pads series and splits them as well
    return resolve_context(replace_settings(config, values) if values else config, table)


def list_unset(config: Config) -> list[str]:
    """List the settings that are left to the data."""
    sections: dict[str, Section] = {
        "data": config.data,
        "model": config.model,
        "train": config.train,
    }
    names = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key in list_from_data(type(section))
        if key not in section.model_fields_set
    ]
    return names + ["train.batch"] * ("batch" not in config.train.model_fields_set)


def _needs_data(config: Config) -> bool:
    """Whether a rule for a setting that is left out looks at the data."""
    unset = set(list_unset(config))
    if config.masked or not unset:
        return False
    return _is_forecast(config) or not unset.isdisjoint(
        {"data.context", "train.batch", "train.epochs", "train.patience"}
    )


def _is_forecast(config: Config) -> bool:
    return bool(config.data.horizon) and config.data.task == "regress" and not config.masked


def read_facts(config: Config, table: Any = None) -> DataFacts:
    """Read what the rules need to know of the data of a config, or of the table passed instead."""
    refuse_undecided(config.data)
    draft = config
    if config.data.context == ALL_ROWS or "context" not in config.data.model_fields_set:
        split = DEFAULT_SPLIT if _shares_series(config) else config.data.split
        whole = config.data.model_copy(update={"context": 1, "split": split})
        draft = config.model_copy(update={"data": whole})
    source = read_source(draft, table)
    roles = source.roles
    past = [name for name in roles.inputs if name not in roles.future]
    facts = DataFacts(
        num_inputs=len(past),
        num_targets=len(roles.targets),
        num_shared=len(set(past) & set(roles.targets)),
        has_static=bool(roles.static),
    )
    if should_stream(draft, source.tables, roles):
        return facts
    raw = load_series(draft, source, min_rows=1).raw
    index = raw.index
    training = splits.assign_first_split(index, source.data).mask(splits.TRAIN)
    by_series = np.add.reduceat(training.astype(np.int64), index.offsets[:-1])
    series = SeriesFacts(
        lengths=np.diff(index.offsets),
        pieces=np.diff(np.append(index.segments, index.num_rows)),
        training_rows=by_series[by_series > 0],
        period=config.data.period or index.infer_period(),
        drift=math.nan,
    )
    if _is_forecast(config) and facts.num_shared:
        columns = [raw.read_column(name) for name in roles.targets if name in past]
        series = replace(series, drift=_measure_drift(columns, training, index, config, series))
    return replace(facts, series=series)


def _shares_series(config: Config) -> bool:
    """Whether the split's shares are of the series, because each is one window."""
    data = config.data
    return data.context == ALL_ROWS and not (data.split.by or data.split.folders)


def _measure_drift(
    columns: Sequence[Floats],
    training: Flags,
    index: SeriesIndex,
    config: Config,
    series: SeriesFacts,
) -> float:
    """Return `SeriesFacts.drift`, over the training rows and the columns of the targets."""
    horizon = config.data.horizon
    context = config.data.context
    if "context" not in config.data.model_fields_set:
        wanted, _ = _choose_span(horizon, series.period)
        context = min(wanted, _limit_context(config, series))
    last = context - 1 + _sample_places(max(index.num_rows - horizon - context + 1, 0))
    first, ahead = last - context + 1, last + horizon
    pieces = (np.searchsorted(index.segments, rows, side="right") for rows in (first, ahead))
    last = last[np.equal(*pieces) & training[ahead] & training[first]]
    if not len(last):
        return math.nan
    owners = np.searchsorted(index.offsets, last, side="right") - 1
    by_last, by_mean = 0.0, 0.0
    for values in columns:
        centre = np.nanmean(values[_sample_places(len(values))])
        # of many series of different size, each counts the same
        parts = np.split(values, index.offsets[1:-1])
        sizes = np.array([np.nanvar(part[_sample_places(len(part))]) for part in parts])
        weights = 1.0 / np.where(sizes > 0, sizes, math.inf)[owners]
        sums = np.zeros(len(values) + 1)
        np.subtract(values, centre, out=sums[1:])  # sums of small numbers lose no digits
        np.nan_to_num(sums, copy=False)
        np.cumsum(sums, out=sums)
        mean = centre + (sums[last + 1] - sums[last + 1 - context]) / context
        for steps in np.unique(np.linspace(1, horizon, NUM_STEPS).astype(np.int64)):
            future = values[last + steps]
            by_last += float(np.nanmean(weights * (future - values[last]) ** 2))
            by_mean += float(np.nanmean(weights * (future - mean) ** 2))
    return by_last / by_mean if by_mean else math.nan


def _sample_places(count: int) -> npt.NDArray[np.int64]:
    """Return the places of so many values; of very many, some at irrational distances, in order, so
    that no phase of a season is left out."""
    if count <= MAX_DRIFT_WINDOWS:
        return np.arange(count)
    places = np.sort(np.arange(MAX_DRIFT_WINDOWS) * GOLDEN_RATIO % 1.0)
    return (places * count).astype(np.int64)


def _choose_channels(config: Config, facts: DataFacts) -> Choice | None:
    """Choose channels of their own where the targets are all that the model reads."""
    if not _is_forecast(config) or facts.num_targets == 1:
        return None
    if not _is_plain(config) and not facts.has_static:
        if facts.num_shared == facts.num_targets == facts.num_inputs:
            return Choice("independent", f"one model learns from all {facts.num_targets} targets")
        return Choice("together", "there are inputs beside the targets")
    return None


def _choose_normalize(config: Config, facts: DataFacts) -> Choice | None:
    """Choose forecasts relative to the window, where it has the targets."""
    if not _is_forecast(config) or _is_plain(config):
        return None
    if not facts.num_shared:
        return Choice("none", "no target is an input")
    if facts.series is not None and facts.series.drift < MAX_DRIFT:
        return Choice("last", "the last row says more of the next ones than the mean of a window")
    return Choice("window", "windows differ in level and spread")


def _choose_context(config: Config, facts: DataFacts) -> Choice | None:
    """Choose a context from the season and the horizon that the series are long enough for."""
    data, series = config.data, facts.series
    if _reads_whole_series(config):
        return Choice("all", "each series is one window")
    rows, reason = USUAL_CONTEXT, "the usual number of rows"
    if series is not None:
        if _is_forecast(config):
            rows, reason = _choose_span(data.horizon, series.period)
        longest = _limit_context(config, series)
        if rows > longest:
            rows, reason = longest, f"the series are too short for {rows} rows"
    multiple = 1
    if config.model.spec.is_sequential:
        multiple = math.lcm(*_list_values(config, "model.patch"))
    if rows >= max(MIN_PATCHED, multiple) and "patch" not in config.model.model_fields_set:
        multiple = math.lcm(multiple, MULTIPLE)
    return Choice(max(rows // multiple * multiple, multiple), reason)


def _reads_whole_series(config: Config) -> bool:
    """Whether each series is one window: of a table with a series per row that are not forecast."""
    data = config.data
    is_cut = data.labels or data.split.rows or data.split.walk_forward
    pads = any(isinstance(step, PadStep) for step in data.prepare)
    is_plain = not (is_cut or pads or config.masked or config.train.state == "carried")
    return data.layout == "wide" and not data.horizon and is_plain


def _choose_span(horizon: int, period: int | None) -> tuple[int, str]:
    """Return the rows that a forecast is made from, and why."""
    rows, reason = USUAL_CONTEXT, "the usual number of rows"
    if period is not None:
        seasons = SEASONS.get(period, DAYS)
        rows, reason = seasons * period, f"{seasons} seasons of {period} rows"
    if HORIZONS * horizon > rows:
        rows, reason = math.ceil(HORIZONS * horizon), f"{HORIZONS:g} times the horizon"
    most = max(MAX_CONTEXT, horizon)
    return (rows, reason) if rows <= most else (most, f"{reason} would be {rows}")


def _limit_context(config: Config, series: SeriesFacts) -> int:
    """Return the longest context that leaves most series and pieces of them usable."""
    horizon = config.data.horizon
    shortest = int(series.lengths.min()) if config.data.short == "error" else MAX_ROWS
    # pieces at least this long have most of the rows
    pieces = np.sort(series.pieces)
    piece = int(pieces[np.searchsorted(np.cumsum(pieces), SHORT_SHARE * pieces.sum())])
    usual = int(np.median(series.training_rows)) if len(series.training_rows) else MAX_ROWS
    return max(min(shortest - horizon, piece - horizon, int(LONG_SHARE * usual)), 1)


def _choose_patch(config: Config, facts: DataFacts) -> Choice | None:
    """Choose the longest patch that leaves enough tokens of every context."""
    kinds = _list_values(config, "model.kind")
    if not any(kind in SPECS and SPECS[kind].is_sequential for kind in kinds):
        return None
    if config.data.context == ALL_ROWS and facts.series is not None:
        rows = int(facts.series.lengths.max())
        for patch in PATCHES if rows >= MIN_PATCHED else ():
            if patch <= MAX_WHOLE_PATCH and rows // patch >= MIN_TOKENS:
                tokens = format_count(-(-rows // patch), "token")
                return Choice(patch, f"{tokens} instead of {rows} time steps")
    if not _is_forecast(config) or _is_plain(config):
        return None
    contexts = _list_values(config, "data.context")
    for patch in PATCHES if min(contexts) >= MIN_PATCHED else ():
        if all(rows % patch == 0 and rows // patch >= MIN_TOKENS for rows in contexts):
            tokens = format_count(config.data.context // patch, "token")
            return Choice(patch, f"{tokens} instead of {config.data.context} time steps")
    return Choice(1, "the context is short")


def _choose_pool(config: Config, _: DataFacts) -> Choice | None:
    """Choose a head that reads every patch, of which there are few."""
    if not _is_forecast(config) or _is_plain(config) or config.model.patch == 1:
        return None
    if "pool" in config.tune.space or not config.model.spec.is_sequential:
        return None
    return Choice("flatten", "the head has weights for every patch")


def _count_windows(config: Config, facts: DataFacts) -> int | None:
    """Return the training windows, roughly; None where windows are not what trains a model."""
    data, series = config.data, facts.series
    if series is None or config.train.state == "carried":
        return None
    if data.context == ALL_ROWS:
        # each series is a window; where the split has shares, the draft's are of each series
        share = data.split.train if _shares_series(config) else None
        share = share if isinstance(share, float) else 1.0
        return max(int(share * len(series.training_rows)), 1)
    lost = data.context + data.horizon - 1
    return int(np.maximum(series.training_rows - lost, 1).sum()) // data.stride


def _choose_batch(config: Config, facts: DataFacts) -> Choice | None:
    """Choose a batch of which an epoch has enough steps."""
    data, windows = config.data, _count_windows(config, facts)
    if windows is None:
        return None
    sequences = facts.num_targets if data.channels == "independent" else 1
    most = _round_to_power(MAX_BATCH / sequences)
    batch = min(max(_round_to_power(windows / MIN_STEPS), MIN_BATCH), most)
    if batch == MAX_BATCH:
        return Choice(batch, "the usual number of windows")
    if batch == most:
        return Choice(batch, f"each window is {sequences} sequences")
    return Choice(batch, f"about {-(-windows // batch)} steps an epoch from {windows:,} windows")


def _choose_lr(config: Config, _: DataFacts) -> Choice | None:
    """Choose a higher learning rate for recurrent layers that take few time steps."""
    can_differ = _is_forecast(config) and not _is_plain(config) and config.train.init_from is None
    can_differ = can_differ and config.model.normalize == "window"  # a random walk needs patience
    if can_differ and config.model.spec.is_recurrent and config.model.patch > 1:
        return Choice(PATCHED_LR, "recurrent layers over patches take larger steps")
    return None


def _choose_epochs(config: Config, facts: DataFacts) -> Choice | None:
    """Choose more epochs where they have few steps."""
    return _cover_steps(config, facts, MIN_UPDATES, config.train.epochs, MAX_EPOCHS)


def _choose_patience(config: Config, facts: DataFacts) -> Choice | None:
    """Choose more patience where epochs have few steps."""
    usual = config.train.patience
    if usual == "off":
        return None
    return _cover_steps(config, facts, MIN_PATIENCE, usual, MAX_PATIENCE)


def _cover_steps(
    config: Config, facts: DataFacts, steps: int, usual: int, most: int
) -> Choice | None:
    """Choose as many epochs as have these steps, more than usual and at most so many; not where
    what was learned before counts."""
    windows, batch = _count_windows(config, facts), config.train.batch
    if windows is None or isinstance(batch, str) or config.train.init_from is not None:
        return None
    of_epoch = max(-(-windows // (batch * config.train.accumulate)), 1)
    epochs = min(-(-steps // of_epoch), most)
    if epochs <= usual:
        return None
    return Choice(epochs, f"an epoch has {format_count(of_epoch, 'step')}")


def _round_to_power(number: float) -> int:
    """Return the largest power of two that is not above a number; at least 1."""
    return 2 ** max(math.floor(math.log2(number)), 0) if number > 0 else 1


RULES: dict[str, Callable[[Config, DataFacts], Choice | None]] = {
    "data.channels": _choose_channels,
    "model.normalize": _choose_normalize,
    "data.context": _choose_context,
    "model.patch": _choose_patch,
    "model.pool": _choose_pool,
    "train.batch": _choose_batch,
    "train.epochs": _choose_epochs,
    "train.patience": _choose_patience,
    "train.lr": _choose_lr,
}
"""The rule of each setting, in the order of their dependence; None leaves a setting at the value
that always works"""


def _is_plain(config: Config) -> bool:
    """Whether the model gets the rows as they are: a class of the user's, or a state that goes on
    from window to window."""
    return config.model.is_custom or config.train.state == "carried"


def _list_values(config: Config, name: str) -> list[Any]:
    """Return the values of a setting in a search, or its only one."""
    section, key = name.split(".")
    entry = config.tune.space.get(name, (getattr(getattr(config, section), key),))
    if not isinstance(entry, Range):
        return list(entry)
    return list(range(int(entry.low), int(entry.high) + 1, int(entry.step or 1)))


def resolve_auto(config: Config, facts: DataFacts) -> ResolvedConfig:
    """Resolve the settings that are left out, or "auto", by the facts of the data."""
    unset, choices = list_unset(config), dict[str, Choice]()
    for name, rule in RULES.items():
        choice = rule(config, facts) if name in unset else None
        if choice is not None:
            config = replace_settings(config, {name: choice.value})
            choices[name] = choice
    return ResolvedConfig(config, choices)
