"""`evaluate`: window by window, or as a stream of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.engine import recovery
from slipstream.errors import UserError
from slipstream.evaluation.scores import score_windows
from slipstream.evaluation.setup import load_evaluation
from slipstream.evaluation.stream import score_stream


@recovery.explain_out_of_memory()
def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    on: str = "test",
    resample: bool = False,
    ensemble: bool | None = None,
    joins: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    allow_code: bool = False,
    stream: bool = False,
    predictions: str | Path | None = None,
) -> dict[str, Any]:
    """Score a run's model; `slipstream.evaluate` documents the arguments."""
    file = None if predictions is None else _check_file(Path(predictions), stream=stream)
    loaded = load_evaluation(
        run,
        data,
        on=on,
        resample=resample,
        joins=joins,
        ensemble=ensemble,
        overrides=overrides,
        allow_code=allow_code,
    )
    return score_stream(loaded) if stream else score_windows(loaded, file)


def _check_file(path: Path, *, stream: bool) -> Path:
    """Refuse a file that cannot be written, before anything is computed."""
    if stream:
        raise UserError(
            "only the predictions of windows are written; choose either these or the stream"
        )
    if path.suffix.lower() != ".parquet":
        raise UserError(f"{path}: these predictions are written as Parquet; name a .parquet file")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; create it first")
    return path
