"""Draw docs/lanes.svg, which explains lanes. It is a sketch, not a measurement.

python dev/lanes.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from figure_style import INK, MUTED, STYLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURE = Path(__file__).parents[1] / "docs" / "lanes.svg"
ENSEMBLE = "#7c3aed"
TRAIN, VALIDATION, TEST = "#bfdbfe", "#f59e0b", "#10b981"
LANES = ((0, 0, 62), (1, 0, 48), (2, 0, 80), (3, 0, 55), (1, 48, 33), (3, 55, 37), (0, 62, 22))
"""Place, start and length of some lanes"""


def draw_places(axes: Axes) -> None:
    for number, (place, begin, length) in enumerate(LANES):
        axes.barh(place, length - 0.8, left=begin, height=0.7, color=TRAIN)
        axes.text(begin + 1.5, place, f"lane {number + 1}", va="center", fontsize=9, color=INK)
    for step in range(0, 92, 4):
        axes.axvline(step, color=MUTED, lw=0.4, alpha=0.35, zorder=0)
    axes.set_title("One program: every step advances all lanes; the next lane takes a free place")
    axes.set_yticks(range(4), [f"place {place}" for place in range(1, 5)])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlabel("steps")
    axes.grid(False)


def draw_folds(axes: Axes) -> None:
    for fold in range(4):
        end = 44 + 14 * fold
        parts = ((0, end - 13, TRAIN), (end - 12, 10, VALIDATION), (end - 1, 14, TEST))
        for begin, length, colour in parts:
            axes.barh(fold, length, left=begin, height=0.6, color=colour)
    for label, colour in (("training", TRAIN), ("validation", VALIDATION), ("test", TEST)):
        axes.barh(0, 0, color=colour, label=label)
    axes.set_title("Walk-forward: each fold is a lane")
    axes.set_yticks(range(4), [f"fold {fold}" for fold in range(1, 5)])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 118)
    axes.set_xlabel("time")
    axes.grid(False)
    axes.legend(loc="upper right", handlelength=1)


def draw_ensemble(axes: Axes) -> None:
    rng = np.random.default_rng(3)
    past, ahead = np.arange(-30, 1), np.arange(0, 25)
    axes.plot(past, np.sin(past / 5), color=INK, lw=1.2)
    each = [
        np.sin(ahead / 5 + rng.normal(0, 0.1)) * rng.normal(1, 0.1) + rng.normal(0, 0.01) * ahead
        for _ in range(8)
    ]
    mean, reach = np.mean(each, axis=0), 0.12 + 0.02 * ahead
    axes.fill_between(ahead, mean - reach, mean + reach, color=TRAIN, lw=0, label="interval")
    for one in each:
        axes.plot(ahead, one, color="#94a3b8", lw=0.8)
    axes.plot([], [], color="#94a3b8", lw=0.8, label="8 seeds")
    axes.plot(ahead, mean, color=ENSEMBLE, lw=2, label="ensemble")
    axes.set_title("Repeats: each seed is a lane")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("time")
    axes.grid(False)
    axes.legend(loc="lower left", handlelength=1.2)


def draw_figure() -> None:
    with mpl.rc_context({**STYLE, "svg.hashsalt": "lanes"}):
        figure = Figure(figsize=(9.6, 5.0), layout="constrained")
        grid = figure.add_gridspec(2, 2)
        draw_places(figure.add_subplot(grid[0, :]))
        draw_folds(figure.add_subplot(grid[1, 0]))
        draw_ensemble(figure.add_subplot(grid[1, 1]))
        figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw_figure()
