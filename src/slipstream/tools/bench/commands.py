"""The commands of the bench: each measures, writes a folder, and returns the content of --json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.tools.bench import cases as sources
from slipstream.tools.bench import ladder as ladders
from slipstream.tools.bench import parity as parities
from slipstream.tools.bench import peers as others
from slipstream.tools.bench import plots, results
from slipstream.tools.bench.results import BenchResult, ProgressCallback

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
    """Time one technique after the other, on the config's job or the standard cases."""
    _refuse_file(out)
    if config:
        selected = [sources.build_case(config, overrides)]
    else:
        selected = sources.build_standard_cases(cases)
    default = 2.5 if not torch.cuda.is_available() else max(1.0, 0.7 * len(selected))
    result = ladders.measure_ladder(selected, minutes=minutes or default, watch=watch)
    return _write(result, out)


def parity(
    config: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    seeds: int = parities.MIN_SEEDS,
    margin: float = parities.MARGIN,
    minutes: float = 10.0,
    out: Path | None = None,
    watch: ProgressCallback = lambda _, __: None,
) -> dict[str, Any]:
    """Compare the accuracy of the naive loop and auto, on the config's data or embedded data."""
    _refuse_file(out)
    if not 0 <= margin < 1:
        raise UserError(f"--margin is {100 * margin:g}; give per cent, from 0 to less than 100")
    case = sources.build_case(config or configs.load_demo(), overrides)
    result = parities.measure_parity(
        [case], seeds=seeds, minutes=minutes, margin=margin, watch=watch
    )
    return _write(result, out)


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
    """Compare steps and whole jobs with a plain loop and Lightning, on real or embedded data."""
    _refuse_file(out)
    if config:
        selected = [sources.build_case(config, overrides)]
        whole = selected if jobs else []
    else:  # without clipping Lightning is fastest
        selected = sources.build_standard_cases(cases, clip="off")
        whole = [sources.build_case(configs.load_demo(), overrides)] if jobs else []
        selected += whole
    return _write(others.compare_with_peers(selected, whole, minutes=minutes, watch=watch), out)


def compare(old: Path, new: Path, *, out: Path | None = None) -> dict[str, Any]:
    """Compare two result folders; a row moved if its repeats lie outside the old spread."""
    _refuse_file(out)
    return _write(results.compare_results(old, new), out)


def _refuse_file(out: Path | None) -> None:
    """Refuse, before anything is measured, an output folder that is a file."""
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a folder")


def _write(result: BenchResult, out: Path | None) -> dict[str, Any]:
    folder = out or runs.create_run(result.kind, out=OUT).folder
    try:
        content = results.write_result(result, folder)
        picture = plots.plot(result, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror})") from None
    tables = [table._asdict() for table in result.tables]
    return content | {"picture": str(picture) if picture else None, "tables": tables}
