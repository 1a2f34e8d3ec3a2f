"""What a tracker gets at the end of a run: its figures, its files, and pictures of its plots."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.tracking.pictures import draw_pictures

FILES = ("config.toml", "best.toml", "plan.json", "metrics.json", "report.html", "signature.json")


def read_figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary that say how good the model is: `test/mae` and so on."""
    return {
        f"{name}/{key}": float(value)
        for name, values in (metrics.get("metrics") or {}).items()
        if isinstance(values, Mapping)
        for key, value in values.items()
        if isinstance(value, int | float)
    }


@contextmanager
def list_files(folder: Path) -> Iterator[dict[str, Path]]:
    """Return the files of a finished run by the names that they get, with pictures of its plots,
    which exist while the context does."""
    files = {name: folder / name for name in FILES if (folder / name).is_file()}
    files |= {f"model/{file.name}": file for file in sorted((folder / "model").glob("*.*"))}
    with tempfile.TemporaryDirectory() as place:
        for picture in draw_pictures(folder, Path(place)):
            files[f"plots/{picture.name}"] = picture
        yield files
