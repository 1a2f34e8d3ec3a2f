"""One function for each command: it measures, writes its folder and returns what --json prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.bench import cases as sources
from slipstream.bench import comparison, pictures, record
from slipstream.bench import ladder as ladders
from slipstream.bench import parity as parities
from slipstream.bench import peers as others
from slipstream.bench.cases import Case
from slipstream.bench.record import Outcome, Watch

OUT = "bench"


def ladder(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    cases: Sequence[str] = (),
    minutes: float | None = None,
    out: Path | None = None,
    watch: Watch = lambda _, __: None,
) -> dict[str, Any]:
    """One technique after the other, on the config's job or the standard cases."""
    found = _cases(config, overrides, cases)
    default = 2.5 if not torch.cuda.is_available() else max(1.0, 0.7 * len(found))
    return _kept(ladders.ladder(found, minutes=minutes or default, watch=watch), out)


def parity(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    seeds: int = parities.LEAST_SEEDS,
    margin: float = parities.MARGIN,
    minutes: float = 10.0,
    out: Path | None = None,
    watch: Watch = lambda _, __: None,
) -> dict[str, Any]:
    """The naive loop and auto, seed by seed, on the config's data or the embedded ones."""
    found = [sources.of_config(config or configs.demo(), overrides)]
    outcome = parities.parity(found, seeds=seeds, minutes=minutes, margin=margin, watch=watch)
    return _kept(outcome, out)


def peers(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    cases: Sequence[str] = (),
    jobs: bool = True,
    minutes: float = 10.0,
    out: Path | None = None,
    watch: Watch = lambda _, __: None,
) -> dict[str, Any]:
    """Beside a plain loop and Lightning: steps, and whole jobs on real or embedded data."""
    # the standard cases without clipping, at which Lightning is at its best
    found = _cases(config, overrides, cases) if config else sources.standard(cases, clip="off")
    whole: list[Case] = []
    if jobs:
        whole = found if config else [sources.of_config(configs.demo(), overrides)]
        found = found if config else [*found, *whole]
    return _kept(others.peers(found, whole, minutes=minutes, watch=watch), out)


def compare(old: Path, new: Path, *, out: Path | None = None) -> dict[str, Any]:
    """What moved beyond the spread from one result folder to another."""
    return _kept(comparison.compare(old, new), out)


def _cases(config: Path | None, overrides: Sequence[str], names: Sequence[str]) -> list[Case]:
    if config is None:
        return sources.standard(names)
    return [sources.of_config(config, overrides)]


def _kept(outcome: Outcome, out: Path | None) -> dict[str, Any]:
    folder = out or runs.create(outcome.kind, out=OUT).folder
    found = record.write(outcome, folder)
    picture = pictures.draw(outcome, folder)
    tables = [table._asdict() for table in outcome.tables]
    return found | {"picture": str(picture) if picture else None, "tables": tables}
