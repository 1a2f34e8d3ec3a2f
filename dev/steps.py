"""Draw docs/steps/*.svg: what each step of data.prepare does to a few rows.

python dev/steps.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from figure_style import INK, MUTED, STYLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream import config as configs
from slipstream.data.columns import read_column
from slipstream.data.files import read_tables
from slipstream.data.prepare.chain import PrepareChain, Replay

FOLDER = Path(__file__).parents[1] / "docs" / "steps"
BEFORE, AFTER, OTHER, WARNING = "#9ca3af", "#2563eb", "#f59e0b", "#dc2626"
HOUR = 3_600_000_000
START = 1_767_225_600_000_000  # 2026-01-01


def prepare(table: Any, step: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Carry out one step, and return the columns."""
    replay = Replay(settings.pop("limits", {}), settings.pop("joins", {}))
    data = configs.load({"data": {"time": "time", "prepare": [step]} | settings}).data
    (result,) = PrepareChain(data, replay=replay).apply(read_tables(data, table)).tables
    return {name: read_column(result, name, "").to_numpy() for name in result.column_names}


def make_wave(rows: int = 60, noise: float = 0.25) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    time = np.arange(rows, dtype=float)
    return {"time": time, "x": np.sin(time / 8) + noise * draw.standard_normal(rows)}


def draw_resample(axes: Axes) -> None:
    wave = make_wave()
    new = prepare(wave, {"step": "resample", "every": 6})
    axes.plot(wave["time"], wave["x"], ".", color=BEFORE, label="rows of the file")
    axes.plot(new["time"], new["x"], "o", color=AFTER, label="every = 6, mean")
    for end, value in zip(new["time"][1:], new["x"][1:], strict=True):
        axes.plot([end - 6, end], [value, value], color=AFTER, lw=1, alpha=0.4)


def draw_filter(axes: Axes) -> None:
    wave = make_wave(noise=0.4)
    axes.plot(wave["time"], wave["x"], color=BEFORE, lw=1, label="x")
    for colour, kind, more in (
        (AFTER, "ema", {"rows": 8}),
        (OTHER, "butterworth", {"cutoff_hz": 0.04}),
    ):
        new = prepare(wave, {"step": "filter", "kind": kind, "columns": ["x"], **more})
        axes.plot(new["time"], new["x"], color=colour, label=kind)


def draw_formula(axes: Axes) -> None:
    wave = make_wave(noise=0.1)
    new = prepare(wave, {"step": "formula", "name": "y", "value": "x - lag(x, 6)"})
    axes.plot(wave["time"], wave["x"], color=BEFORE, label="x")
    axes.plot(new["time"], new["y"], color=AFTER, label="x - lag(x, 6)")
    axes.axvspan(-0.5, 5.5, color=MUTED, alpha=0.12, lw=0)
    axes.text(0, axes.get_ylim()[0], " left out", color=MUTED, fontsize=8, va="bottom")


def draw_calendar(axes: Axes) -> None:
    hours = np.arange(96)
    times = pa.array(START + HOUR * hours).cast(pa.timestamp("us"))
    table = pa.table({"time": times, "x": hours.astype(float)})
    step = {"step": "calendar", "features": ["hour"], "holidays": ["2026-01-03"]}
    new = prepare(table, step)
    for name, colour in (("hour_sin", AFTER), ("hour_cos", OTHER), ("holiday", BEFORE)):
        axes.plot(hours / 24, new[name], color=colour, label=name)
    axes.set_xlabel("days")


def draw_join(axes: Axes) -> None:
    rows, bars = np.arange(64), np.array([1.0, 3.0, 2.0, 4.0])
    times = pa.array(START + HOUR // 4 * rows).cast(pa.timestamp("us"))
    starts = pa.array(START + 4 * HOUR * np.arange(4)).cast(pa.timestamp("us"))
    joined = pa.table({"time": starts, "close": bars})
    step = {"step": "join", "path": "bars", "period": "4h", "prefix": "h4_"}
    table = pa.table({"time": times, "x": rows.astype(float)})
    new = prepare(table, step, joins={"bars": joined})
    for start, value in enumerate(bars):
        axes.plot([4 * start, 4 * start + 4], [value, value], color=BEFORE, lw=6, alpha=0.5)
    axes.plot([], [], color=BEFORE, lw=6, alpha=0.5, label="4 h bars")
    known = 16 - len(new["h4_close"]) / 4 + np.arange(len(new["h4_close"])) / 4
    axes.plot(known, new["h4_close"], ".", color=AFTER, label="joined to 15 min rows")
    axes.plot(rows / 4, bars[rows // 16] + 0.25, ":", color=WARNING, lw=1)
    axes.plot([], [], ":", color=WARNING, label="join by time alone: from the future")
    axes.set_xlabel("hours")


def draw_label(axes: Axes) -> None:
    draw = np.random.default_rng(4)
    close = 100 * np.exp(np.cumsum(0.006 * draw.standard_normal(40)))
    step = {"step": "label", "name": "move", "column": "x", "kind": "barrier", "rows": 8}
    table = {"time": np.arange(40.0), "x": close}
    new = prepare(table, step | {"up": 0.012}, task="classify", targets=["move"])
    axes.plot(close, color=BEFORE, label="x")
    at = 8
    upper, lower = close[at] * 1.012, close[at] * 0.988
    axes.fill_between([at, at + 8], lower, upper, color=AFTER, alpha=0.12, lw=0)
    for name, colour in (("up", AFTER), ("down", WARNING), ("flat", MUTED)):
        mine = np.flatnonzero(new["move"] == name)
        axes.plot(mine, close[mine], "o", ms=4, color=colour, label=name)


def draw_unit(axes: Axes) -> None:
    wave = make_wave(noise=0.05)
    wave["x"] = 20 + 5 * wave["x"]
    step = {"step": "unit", "columns": ["x"], "factor": 1.8, "offset": 32.0, "unit": "degF"}
    new = prepare(wave, step)
    axes.plot(wave["time"], wave["x"], color=BEFORE, label="x in °C")
    axes.plot(new["time"], new["x"], color=AFTER, label="x * 1.8 + 32, in °F")


def draw_pad(axes: Axes) -> None:
    wave = make_wave(noise=0.1)
    new = prepare(wave, {"step": "pad", "rows": 20})
    axes.plot(wave["time"], wave["x"], color=BEFORE, label="rows of the file")
    axes.plot(new["time"][:20], new["x"][:20], ".", color=AFTER, label="rows = 20: context only")


def draw_clip(axes: Axes) -> None:
    wave = make_wave()
    new = prepare(wave, {"step": "clip", "columns": ["x"], "low": -0.5, "high": 1.0})
    axes.plot(wave["time"], wave["x"], color=BEFORE, label="x")
    axes.plot(new["time"], new["x"], color=AFTER, label="low = -0.5, high = 1")


def draw_outliers(axes: Axes) -> None:
    wave = make_wave()
    wave["x"][[12, 31, 52]] += [6, -5, 7]
    training = wave["x"][:42]
    middle = float(np.median(training))
    spread = 6 * 1.4826 * float(np.median(np.abs(training - middle))) / 2
    limits = {"1": {"x": (middle - spread, middle + spread)}}
    new = prepare(wave, {"step": "outliers", "columns": ["x"], "z": 3.0}, limits=limits)
    axes.plot(wave["time"], wave["x"], color=BEFORE, label="x")
    axes.plot(new["time"], new["x"], color=AFTER, label='method = "robust_z", z = 3')
    axes.axvspan(0, 41.5, color=OTHER, alpha=0.12, lw=0, label="training rows")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    pictures: dict[str, Callable[[Axes], None]] = {
        name.removeprefix("draw_"): value
        for name, value in globals().items()
        if name.startswith("draw_")
    }
    for name, draw in pictures.items():
        with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
            figure = Figure(figsize=(6.4, 2.0), layout="constrained")
            axes = figure.subplots()
            draw(axes)
            axes.tick_params(colors=INK)
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1, frameon=False)
            path = FOLDER / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None}, facecolor="white")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
