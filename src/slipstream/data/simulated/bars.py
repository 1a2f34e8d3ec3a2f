"""An embedded data set: simulated market bars whose regime switches.

Twenty instruments, 4,000 bars each. A hidden regime holds for some 150 bars, then another one takes
over:

    quiet     returns without memory, of steady size
    trend     returns that tend to be followed by their like
    revert    returns that tend to be undone
    storm     returns whose size itself wanders, and volume with it

All have about the same spread, and every instrument a size and a volume of its own, so that one bar
says little; a window's autocorrelation, bursts and volume tell the regime. Few bars have been
looked at by somebody: `label` is the regime of 5 bars of each instrument in its first 70 %, of 2 or
3 in the next 10 %, and of every eighth bar of the rest, to test with; elsewhere it is empty.
A bar holds logarithmic returns in per cent from the close before it. One seed gives one data
set, on any machine.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[np.float64]

REGIMES = ("quiet", "trend", "revert", "storm")
NUM_INSTRUMENTS, NUM_BARS = 20, 4000
MEAN_BARS = 150
MEMORY = np.array([0.0, 0.55, -0.55, 0.0])
"""The correlation of a return with the next one"""
WANDER = np.array([0.05, 0.15, 0.15, 0.75])
"""Deviation of the logarithm of a return's size"""
BUSY = np.array([0.0, 0.15, 0.1, 0.25])
"""The mean of the logarithm of the volume"""
LABELLED = ((0, 0.7, (5, 5)), (0.7, 0.8, (2, 3)))
"""Parts of an instrument's bars: begin and end as shares, and the numbers of labelled bars, by
turns"""
TEST_FROM, TEST_EVERY = 0.8, 8
CLEAR = 64
"""Bars after a border that have no label, so that windows of a set share none with those before"""
SIZE_MEMORY, VOLUME_MEMORY = 0.9, 0.6
PARTS = 8
"""The number of price steps within a bar"""


def simulate(seed: int = 0) -> pa.Table:
    """Simulate one long table: instrument, bar, open, high, low, close, volume, regime, label."""
    draw = np.random.default_rng(seed)
    regime = _draw_regimes(draw)
    scale = np.exp(0.3 * draw.standard_normal(NUM_INSTRUMENTS))
    level = 0.5 * draw.standard_normal(NUM_INSTRUMENTS)
    shape = (NUM_BARS, NUM_INSTRUMENTS)
    bars = {name: np.zeros(shape) for name in ("open", "high", "low", "close", "volume")}
    size, before, volume = (np.zeros(NUM_INSTRUMENTS) for _ in range(3))
    for bar in range(NUM_BARS):
        now = regime[bar]
        kick = draw.standard_normal((3, NUM_INSTRUMENTS))
        size = SIZE_MEMORY * size + np.sqrt(1 - SIZE_MEMORY**2) * kick[0]
        spread = np.exp(WANDER[now] * size - WANDER[now] ** 2)  # of mean square 1
        memory = MEMORY[now]
        before = memory * before + np.sqrt(1 - memory**2) * spread * kick[1]
        volume = VOLUME_MEMORY * volume + np.sqrt(1 - VOLUME_MEMORY**2) * kick[2]
        busy = BUSY[now] + 0.4 * volume + 0.5 * WANDER[now] * size
        for name, values in _draw_bar(draw, before, spread).items():
            bars[name][bar] = values * scale
        bars["volume"][bar] = level + busy
    return _make_table(bars, regime, _draw_labelled(draw))


def _draw_regimes(draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return a random regime of each bar, [bars, instruments]."""
    regimes = np.zeros((NUM_BARS, NUM_INSTRUMENTS), dtype=np.int64)
    now = draw.integers(len(REGIMES), size=NUM_INSTRUMENTS)
    for bar in range(NUM_BARS):
        switch = draw.random(NUM_INSTRUMENTS) < 1 / MEAN_BARS
        step = draw.integers(1, len(REGIMES), size=NUM_INSTRUMENTS)
        now = np.where(switch, (now + step) % len(REGIMES), now)
        regimes[bar] = now
    return regimes


def _draw_labelled(draw: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return a random mask of the bars with a label, [bars, instruments]."""
    mask = np.zeros((NUM_BARS, NUM_INSTRUMENTS), dtype=bool)
    for instrument in range(NUM_INSTRUMENTS):
        for begin, end, counts in LABELLED:
            among = np.arange(round(begin * NUM_BARS) + CLEAR, round(end * NUM_BARS))
            count = counts[instrument % len(counts)]
            mask[draw.choice(among, count, replace=False), instrument] = True
    mask[round(TEST_FROM * NUM_BARS) + CLEAR :: TEST_EVERY] = True
    return mask


def _draw_bar(draw: np.random.Generator, close: Array, spread: Array) -> dict[str, Array]:
    """Return the random prices within a bar: a walk from one close to the next."""
    steps = draw.standard_normal((PARTS, len(close))) * spread / np.sqrt(PARTS)
    path = np.cumsum(steps, axis=0)
    share = (np.arange(1, PARTS + 1) / PARTS)[:, None]
    path += share * (close - path[-1])
    first = 0.2 * steps[0]
    return {
        "open": first,
        "high": np.maximum(path.max(axis=0), first),
        "low": np.minimum(path.min(axis=0), first),
        "close": close,
    }


def _make_table(
    bars: dict[str, Array], regime: npt.NDArray[np.int64], labelled: npt.NDArray[np.bool_]
) -> pa.Table:
    names = [f"instrument-{i:02d}" for i in range(1, NUM_INSTRUMENTS + 1)]
    named = np.array(REGIMES)[regime.T.ravel()]
    return pa.table(
        {
            "instrument": np.repeat(names, NUM_BARS),
            "bar": np.tile(np.arange(NUM_BARS), NUM_INSTRUMENTS),
            **{name: values.T.ravel() for name, values in bars.items()},
            "regime": named,
            "label": pa.array(named, mask=~labelled.T.ravel()),
        }
    )
