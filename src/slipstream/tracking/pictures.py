"""Pictures of a finished run for trackers: its losses, and predictions on the test set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.data import prediction_columns
from slipstream.reporting.figure_style import INK, MODEL, STYLE
from slipstream.tracking.points import PointReader

MOST_ROWS = 1500
"""Of a series in a picture"""
SIZE = (9.0, 3.6)
PREDICTED = f"_{prediction_columns.PREDICTED}"


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
    import pyarrow.parquet as pq

    file = folder / "predictions.parquet"
    if not file.is_file():
        return False
    table = pq.ParquetFile(file)
    target = next(
        (
            name.removesuffix(PREDICTED)
            for name in table.schema_arrow.names
            if name.endswith(PREDICTED) and name.removesuffix(PREDICTED) in table.schema_arrow.names
        ),
        None,
    )
    if target is None:  # classes, or rows without a target
        return False
    wanted = ["series", "row", "step", target, target + PREDICTED]
    rows = next(table.iter_batches(columns=wanted), None)
    if not rows:
        return False
    frame = rows.to_pydict()
    first = frame["series"][0], frame["step"][0]
    chosen = [
        number
        for number, key in enumerate(zip(frame["series"], frame["step"], strict=True))
        if key == first
    ][:MOST_ROWS]
    for name, colour, label in ((target, INK, "true"), (target + PREDICTED, MODEL, "predicted")):
        axes.plot(
            [frame["row"][number] for number in chosen],
            [frame[name][number] for number in chosen],
            color=colour,
            label=label,
        )
    axes.set(title=f"{target}: the first series of the test set", xlabel="row")
    axes.legend()
    return True
