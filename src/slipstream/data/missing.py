"""Missing values: those of inputs are refused, repeated or dropped (`data.missing`); rows without a
target stay, and the windows that would predict them are left out."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.config import Signature

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_RUNS: Ints = np.empty((0, 2), dtype=np.int64)
CODES = {-99, -200, -999, -9999, -99999, 999, 9999, 99999, 32767, -32768, 65535}
"""Numbers that loggers write where a value is missing"""
CODE_DISTANCE = 0.25
"""How far from all other values, in their deviations, such a number is a code"""
MIN_REPEATED, MIN_OTHERS = 5, 20
"""How often such a code occurs at least, and how many different values there are beside it"""


class MissingCode(NamedTuple):
    """A number that seems to mean "missing", and the range of all other values."""

    value: float
    share: float
    low: float
    high: float


def find_codes(values: Floats) -> Iterator[MissingCode]:
    """Yield the lowest or the highest value of a column if it is repeated, far from all others."""
    for extreme in (values.min(), values.max()) if len(values) else ():
        is_code = values == extreme
        others = values[~is_code]
        if is_code.sum() < MIN_REPEATED or len(np.unique(others)) < MIN_OTHERS:
            continue
        low, high, spread = float(others.min()), float(others.max()), float(others.std())
        gap = max(low - float(extreme), float(extreme) - high)
        is_usual = any(abs(extreme - code) <= 1e-4 * abs(code) for code in CODES)
        is_zero = abs(extreme) <= 1e-5 * float(values.std())
        if not is_zero and (gap > high - low or (is_usual and gap > CODE_DISTANCE * spread)):
            yield MissingCode(float(extreme), float(is_code.mean()), low, high)


def fill_forward(values: Floats) -> Floats:
    """Replace each missing value by the last known one; those before any stay missing."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    known = np.maximum.accumulate(np.where(missing, -1, np.arange(len(missing))))
    return np.where(known >= 0, values[known], np.nan)


def encode_runs(rows: Flags) -> Ints:
    """Return runs of marked rows, [runs, 2]: from one row to before another."""
    edges = np.flatnonzero(np.diff(rows, prepend=False, append=False))
    return edges.reshape(-1, 2)


def join_runs(parts: list[Ints]) -> Ints:
    """Return runs that follow each other as one array; those that touch become one."""
    runs = np.concatenate([NO_RUNS, *parts])
    if not len(runs):
        return runs
    touching = runs[1:, 0] == runs[:-1, 1]
    begins, ends = runs[:, 0], runs[:, 1]
    return np.stack([begins[np.append(True, ~touching)], ends[np.append(~touching, True)]], axis=1)


def describe_missing(dropped: Flags, missing: dict[str, Ints], *, policy: str) -> str:
    """Say how many values were repeated, and how many rows are left out and for which columns."""
    counts = {name: len(rows) for name, rows in missing.items()}
    if policy == "drop":
        return f"left out rows with missing values: {list_counts(counts)}"
    first = int(dropped.sum())  # these rows come before all others
    repeated = {name: int((rows >= first).sum()) for name, rows in missing.items()}
    parts = []
    if any(repeated.values()):
        parts.append(f"repeated the last known value: {list_counts(repeated)}")
    if first:
        unknown = {name: counts[name] - repeated[name] for name in counts}
        rows = "the first row" if first == 1 else f"the first {first:,} rows"
        parts.append(f"left out {rows}, before every value is known: {list_counts(unknown)}")
    return "; ".join(parts)


def list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def describe_left_out(
    left_out: dict[str, int], num_windows: dict[str, int], signature: Signature
) -> list[str]:
    """Note how many windows of each set are left out because what they predict is missing."""
    parts = [
        f"{count:,} of {count + num_windows[name]:,}" + (f" {name}" if len(left_out) > 1 else "")
        for name, count in left_out.items()
        if count
    ]
    if not parts:
        return []
    what = "windows whose target is missing"
    if signature.classes:
        what = "windows without a label"
    elif signature.masked:
        what = "windows in which a value is missing"
    elif signature.steps_out > 1 or len(signature.targets) > 1:
        what = "windows of which a target is missing"
    return [f"left out {what}: {', '.join(parts)}"]
