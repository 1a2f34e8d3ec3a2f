"""`evaluate`: window by window, or as a stream of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.engine import recovery
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
) -> dict[str, Any]:
    """Score a run's model; `slipstream.evaluate` documents the arguments."""
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
    return score_stream(loaded) if stream else score_windows(loaded)
