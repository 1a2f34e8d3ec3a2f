"""One function for each command: it measures, writes its folder and returns what --json prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.bench import cases as sources
from slipstream.bench import comparison, plots, results
from slipstream.bench import ladder as ladders
from slipstream.bench import parity as parities
from slipstream.bench import peers as others
from slipstream.bench.cases import Case
from slipstream.bench.results import BenchResult, ProgressCallback
from slipstream.errors import UserError

OUT = "bench"


def ladder(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    cases: Sequence[str] = (),
    minutes: float | None = None,
    out: Path | None = None,
    watch: ProgressCallback = lambda _, __: None,
) -> dict[str, Any]:
    """One technique after the other, on the config's job or the standard cases."""
    _refuse_file(out)
    found = _cases(config, overrides, cases)
    default = 2.5 if not torch.cuda.is_available() else max(1.0, 0.7 * len(found))
    return _kept(ladders.measure_ladder(found, minutes=minutes or default, watch=watch), out)


def parity(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    seeds: int = parities.LEAST_SEEDS,
    margin: float = parities.MARGIN,
    minutes: float = 10.0,
    out: Path | None = None,
    watch: ProgressCallback = lambda _, __: None,
) -> dict[str, Any]:
    """The naive loop and auto, seed by seed, on the config's data or the embedded ones."""
    _refuse_file(out)
    if not 0 <= margin < 1:
        raise UserError(f"--margin is {100 * margin:g}; give per cent, from 0 to less than 100")
    found = [sources.build_case(config or configs.load_demo(), overrides)]
    outcome = parities.measure_parity(
        found, seeds=seeds, minutes=minutes, margin=margin, watch=watch
    )
    return _kept(outcome, out)


def peers(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    cases: Sequence[str] = (),
    jobs: bool = True,
    minutes: float = 10.0,
    out: Path | None = None,
    watch: ProgressCallback = lambda _, __: None,
) -> dict[str, Any]:
    """Beside a plain loop and Lightning: steps, and whole jobs on real or embedded data."""
    _refuse_file(out)
    # the standard cases without clipping, at which Lightning is at its best
    found = (
        _cases(config, overrides, cases)
        if config
        else sources.build_standard_cases(cases, clip="off")
    )
    whole: list[Case] = []
    if jobs:
        whole = found if config else [sources.build_case(configs.load_demo(), overrides)]
        found = found if config else [*found, *whole]
    return _kept(others.compare_with_peers(found, whole, minutes=minutes, watch=watch), out)


def compare(old: Path, new: Path, *, out: Path | None = None) -> dict[str, Any]:
    """What moved beyond the spread from one result folder to another."""
    _refuse_file(out)
    return _kept(comparison.compare(old, new), out)


def _cases(config: Path | None, overrides: Sequence[str], names: Sequence[str]) -> list[Case]:
    if config is None:
        return sources.build_standard_cases(names)
    return [sources.build_case(config, overrides)]


def _refuse_file(out: Path | None) -> None:
    """Say before anything is measured that results cannot be written."""
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a folder")


def _kept(outcome: BenchResult, out: Path | None) -> dict[str, Any]:
    folder = out or runs.create_run(outcome.kind, out=OUT).folder
    try:
        found = results.write_result(outcome, folder)
        picture = plots.plot(outcome, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror})") from None
    tables = [table._asdict() for table in outcome.tables]
    return found | {"picture": str(picture) if picture else None, "tables": tables}
