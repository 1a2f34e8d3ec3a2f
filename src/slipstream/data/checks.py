"""Cheap checks for suspicious data: codes for "missing", copies of a target, row numbers among the
inputs, test rows unlike those of training or validation.

They look at no more than `MAX_VALUES` values, in scaled units, whatever the size of the data.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from slipstream.base.text import format_count, format_number
from slipstream.config import Signature
from slipstream.data import series
from slipstream.data.dataset import Dataset
from slipstream.data.scaler import SeriesMoments, order_columns

Values = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

MAX_VALUES = 20_000_000
"""The number of values, over all columns, that the checks look at"""
MAX_ROWS = 200_000
"""The number of rows that the checks look at"""
MAX_SERIES = 20
"""The number of series in which a target is compared with the inputs"""
STEADY = 0.999
"""A column with at least this share of equal steps counts the rows"""
OUTSIDE = 0.25
"""A note is written from this share of test rows outside the range of the training rows on"""
UNLIKE = 0.7
"""The largest distance between the distributions of two sets (Kolmogorov-Smirnov) without a note"""
UNEQUAL = 100
"""The largest ratio between the deviations of two series without a note"""
MAX_NAMED = 3
MIN_ROWS = 30
"""A set with fewer rows gets no note: its statistics mean little"""


def find_suspicious(dataset: Dataset) -> list[str]:
    """Return notes on suspicious data; an empty list for streamed tables, whose rows are not in
    memory."""
    if dataset.memory is None:
        return []
    checks: tuple[Callable[[Dataset], Iterator[str]], ...] = (
        _find_codes,
        _find_copies,
        _find_counters,
        _compare_sets,
        _compare_series,
    )
    return [note for check in checks for note in check(dataset)]


def _list_columns(dataset: Dataset) -> list[tuple[int, str]]:
    """Return the positions and names of the columns that hold numbers, labels excluded."""
    labels = dataset.signature.targets if dataset.signature.classes else ()
    columns = enumerate(order_columns(dataset.signature))
    return [(i, name) for i, name in columns if name not in labels]


def _sample(dataset: Dataset, rows: Ints | None = None) -> Values:
    """Return a sample of the rows, evenly spread over all rows or over `rows`."""
    assert dataset.memory is not None
    values: Values = dataset.memory.series.values.numpy()
    limit = min(MAX_ROWS, max(MAX_VALUES // values.shape[1], 1))
    count = len(values) if rows is None else len(rows)
    stride = max(-(-count // limit), 1)
    rows = np.arange(0, count, stride) if rows is None else rows[::stride]
    sample = torch.from_numpy(values[rows])
    series = dataset.memory.series
    scaled: Values = series.to_table_scale(sample, torch.from_numpy(rows), slice(None)).numpy()
    return scaled


def _to_physical(dataset: Dataset, name: str, scaled: float) -> float:
    return float(scaled) * dataset.scaler.size[name] + dataset.scaler.shift[name]


def _find_codes(dataset: Dataset) -> Iterator[str]:
    """Note columns whose lowest or highest value is repeated and far from all other values."""
    sample = _sample(dataset)
    for i, name in _list_columns(dataset):
        column = sample[:, i].astype(np.float64)
        column = column * dataset.scaler.size[name] + dataset.scaler.shift[name]
        for code in series.find_codes(column[~np.isnan(column)]):
            yield (
                f'column "{name}": {format_number(100 * code.share, figures=2)} % of the values '
                f"are {code.value:.6g}, all others {code.low:.6g} to {code.high:.6g}; if it means "
                f'"missing", set data.na = [{code.value:.6g}]'
            )


def _find_copies(dataset: Dataset) -> Iterator[str]:
    """Note inputs that give away a target of the same row, up to a factor and an offset of their
    own in each series."""
    signature = dataset.signature
    inputs = signature.future if signature.horizon else signature.inputs
    if not inputs or signature.masked:
        return
    remedy = "remove it from data.future" if signature.horizon else "name it in data.ignore"
    is_copy = _is_code_of if signature.classes else series.is_same
    samples = list(_sample_series(dataset))
    columns = order_columns(signature)
    for target in range(len(columns) - len(signature.targets), len(columns)):
        for i, name in enumerate(inputs):
            if samples and all(is_copy(sample[:, i], sample[:, target]) for sample in samples):
                yield (
                    f'input "{name}" tells the target "{columns[target]}" of the same row; if it '
                    f"is not known when the model is used, {remedy}"
                )


def _sample_series(dataset: Dataset) -> Iterator[Values]:
    """Yield samples of rows with a target: one for each of several series, or for classes one of
    all series."""
    assert dataset.memory is not None
    values: Values = dataset.memory.series.values.numpy()
    if dataset.signature.classes:
        sample = _sample(dataset)
        yield sample[sample[:, -1] >= 0]
        return
    offsets = dataset.index.offsets
    for s in range(0, len(offsets) - 1, -(-len(offsets) // MAX_SERIES)):
        length = int(offsets[s + 1] - offsets[s])
        stride = max(length * values.shape[1] * MAX_SERIES // MAX_VALUES, 1)
        rows = values[offsets[s] : offsets[s + 1] : stride]
        rows = rows[~np.isnan(rows).any(axis=1)]
        if len(rows) >= MIN_ROWS and rows[:, len(dataset.signature.inputs) :].std(axis=0).all():
            yield rows


def _is_code_of(codes: Values, classes: Values) -> bool:
    """Return whether each class has exactly one value, which no other class has."""
    pairs = np.unique(np.stack([codes, classes]), axis=1).shape[1]
    return bool(pairs == len(np.unique(codes)) == len(np.unique(classes)) > 1)


def _find_counters(dataset: Dataset) -> Iterator[str]:
    """Note inputs that count the rows, and inputs that number the series."""
    assert dataset.memory is not None
    values: Values = dataset.memory.series.values.numpy()
    offsets, count = dataset.index.offsets, len(dataset.index.series_names)
    limit = min(MAX_ROWS, max(MAX_VALUES // values.shape[1], 1))
    inside = np.ones(min(len(values), limit) - 1, dtype=bool)
    breaks = dataset.index.breaks
    inside[breaks[(breaks > 0) & (breaks < len(inside))] - 1] = False
    for i, name in enumerate(dataset.signature.inputs):
        steps = np.diff(values[:limit, i])[inside]
        if len(steps) < MIN_ROWS:
            continue
        usual = float(np.median(steps))
        if usual and np.mean(np.abs(steps - usual) <= 0.1 * abs(usual)) >= STEADY:
            yield (
                f'input "{name}" rises by the same step in every row: a row number or a time says '
                "nothing about rows that are not seen yet; name it in data.time or data.ignore"
            )
        elif (
            count > 2
            and not steps.any()
            and _numbers_series(_sample(dataset, offsets[:-1])[:, i], dataset, name)
        ):
            yield (
                f'input "{name}" is a number of its own for each of the {count:,} series: an id '
                "says nothing about other series; name it in data.id or data.ignore"
            )


def _numbers_series(firsts: Values, dataset: Dataset, name: str) -> bool:
    """Return whether the first values of the series are whole numbers that all differ."""
    physical = firsts * dataset.scaler.size[name] + dataset.scaler.shift[name]
    whole = np.abs(physical - np.round(physical)) <= 1e-4 * np.maximum(np.abs(physical), 1.0)
    return bool(whole.all() and len(np.unique(firsts)) == len(firsts))


def _compare_sets(dataset: Dataset) -> Iterator[str]:
    """Note columns whose test rows are outside of training's range, and targets whose validation
    rows are unlike the test rows."""
    assert dataset.memory is not None
    signature, starts = dataset.signature, dataset.memory.starts
    if signature.masked:
        return
    rows = {
        name: _sample_target_rows(set_starts.numpy(), dataset)
        for name, set_starts in starts.items()
    }
    if min(len(set_rows) for set_rows in rows.values()) < MIN_ROWS:
        return
    train, val, test = (_sample(dataset, rows[name]) for name in ("train", "val", "test"))
    outside = {}
    for i, name in _list_columns(dataset):
        column, low, high = test[:, i], np.nanmin(train[:, i]), np.nanmax(train[:, i])
        share = float(np.mean((column < low) | (column > high)))
        if share > OUTSIDE:
            edges = map(float, (low, high, np.nanmin(column), np.nanmax(column)))
            a, b, c, d = (f"{_to_physical(dataset, name, edge):.5g}" for edge in edges)
            outside[name] = (
                f'{100 * share:.0f} % of "{name}" ({a} to {b} in training, {c} to {d} here)'
            )
        elif name in signature.targets and _measure_distance(val[:, i], column) > UNLIKE:
            means = (float(np.nanmean(sample[:, i])) for sample in (val, test))
            a, b = (f"{_to_physical(dataset, name, mean):.4g}" for mean in means)
            yield (
                f'target "{name}": the validation rows are unlike the test rows (mean {a} and '
                f"{b}), so the best epoch for one may not be the best for the other; choose "
                "another data.split, or data.split.walk_forward"
            )
    if outside:
        yield _describe_outside(outside, signature)


def _compare_series(dataset: Dataset) -> Iterator[str]:
    """Note targets of which the series differ much in size, where all have one scale."""
    assert dataset.memory is not None
    offsets, names = dataset.index.offsets, dataset.index.series_names
    signature = dataset.signature
    if len(names) < 2 or signature.classes or dataset.scaler.series or dataset.by_window:
        return
    owners = np.repeat(np.arange(len(names)), np.diff(offsets))
    for i, name in enumerate(signature.targets):
        if name not in signature.inputs or name in signature.future:
            continue
        column = dataset.memory.series.targets[:, i].double().numpy()
        known = ~np.isnan(column)
        fit = SeriesMoments(len(names))
        fit.add(column[known], owners[known])
        spread = fit.deviation * dataset.scaler.size[name]
        used = np.flatnonzero(spread > 1e-6 * dataset.scaler.deviation[name])
        if len(used) < 2 or spread[used].max() <= UNEQUAL * spread[used].min():
            continue
        small, large = used[spread[used].argmin()], used[spread[used].argmax()]
        yield (
            f'target "{name}": the series differ in size: its deviation is {spread[small]:.3g} in '
            f'"{names[small]}" and {spread[large]:.3g} in "{names[large]}", so that the large '
            'series decide the loss; data.scale_by = "series" scales each by itself'
        )


def _describe_outside(outside: dict[str, str], signature: Signature) -> str:
    """Describe the first columns, with a hint where the level of a forecast target drifts."""
    listed = ", ".join(list(outside.values())[:MAX_NAMED])
    left = len(outside) - MAX_NAMED
    more = f" and {format_count(left, 'more column')}" if left > 0 else ""
    autoregressive = set(signature.inputs) & set(signature.targets)
    hint = (
        '; where a level drifts, model.normalize = "last" helps'
        if autoregressive & set(outside)
        else ""
    )
    return f"test rows are outside of what training sees: {listed}{more}{hint}"


def _sample_target_rows(starts: Ints, dataset: Dataset) -> Ints:
    """Return a sample of the rows that windows predict, evenly spread over the windows."""
    sampled = starts[:: max(-(-len(starts) // MAX_ROWS), 1)]
    return sampled + dataset.signature.lead + np.arange(len(sampled)) % dataset.signature.steps_out


def _measure_distance(val: Values, test: Values) -> float:
    """Return the largest difference of the two cumulative distributions, 0 to 1."""
    val, test = (np.sort(values[~np.isnan(values)]) for values in (val, test))
    values = np.concatenate([val, test])
    val_below = np.searchsorted(val, values, side="right") / len(val)
    test_below = np.searchsorted(test, values, side="right") / len(test)
    return float(np.abs(val_below - test_below).max())
