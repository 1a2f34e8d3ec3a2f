"""Pictures of a finished run for trackers: its losses, and predictions on the test set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.reporting.figure_style import INK, MODEL, STYLE
from slipstream.tracking.points import PointReader

MOST_ROWS = 1500
"""Of a series in a picture"""
SIZE = (9.0, 3.6)


def draw_pictures(folder: Path, place: Path) -> Iterator[Path]:
    """Draw what a run has, and return the files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawings = {"losses": _draw_losses, "predictions": _draw_predictions}
    with mpl.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            if draw(folder, figure.subplots()):
                file = place / f"{name}.png"
                figure.savefig(file, dpi=120)
                yield file


def _draw_losses(folder: Path, axes: Any) -> bool:
    reader = PointReader(0.0)
    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for event in runs.read_events(runs.Run(folder)):
        for point in reader.read(event):
            if point.name in ("train_loss", "val_loss"):
                curves[point.name][point.part].append((point.step, point.value))
    for name, colour in (("train_loss", INK), ("val_loss", MODEL)):
        for number, curve in enumerate(curves[name].values()):
            label = name.replace("_", " ") if number == 0 else None
            axes.plot(*zip(*curve, strict=True), color=colour, alpha=0.8, label=label)
    if curves["val_loss"]:
        axes.set(title="Losses", xlabel="step", yscale="log")
        axes.legend()
    return bool(curves["val_loss"])


def _draw_predictions(folder: Path, axes: Any) -> bool:
    """Draw the first target of the first series; of a forecast, its first row ahead."""
    from slipstream.data.prediction_columns import ROW, STEP, name_columns
    from slipstream.reporting.plots.predictions import read_predictions

    file = folder / "predictions.parquet"
    if not file.is_file():
        return False
    predictions = read_predictions(file)
    if not (len(predictions) and predictions.targets):  # classes are not drawn
        return False
    target = predictions.targets[0]
    chosen = predictions.codes == predictions.codes[0]
    if predictions.is_forecast:
        chosen &= predictions[STEP] == predictions[STEP][0]
    rows = chosen.nonzero()[0][:MOST_ROWS]
    lines = {"true": (target, INK), "predicted": (name_columns(target).predicted, MODEL)}
    for label, (name, colour) in lines.items():
        axes.plot(predictions[ROW][rows], predictions[name][rows], color=colour, label=label)
    axes.set(title=f"{target}: the first series of the test set", xlabel="row")
    axes.legend()
    return True
