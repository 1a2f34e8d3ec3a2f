"""What several tests share: small tables, small configs, real data, tolerances."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from slipstream import config as configs
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.events import Event, format_event
from slipstream.kernels import build_library, find_compiler, find_library
from slipstream.runs import Run
from tests.validation import find_log_problems, find_problems

torch.set_num_threads(1)  # tests run side by side
# Drawn tests draw the same examples each time, so that what fails is what a change broke; `make
# test-drawn` draws others, and more. No timing is asserted.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("drawn", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("same")
REAL = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).parents[2] / "shared" / "data"))
if not hasattr(os, "fork"):  # Windows
    os.fork = lambda: pytest.skip("this system does not fork")
HUNG_S = 3600.0
"""A process that has not ended by then never will; how long it takes is not tested"""
INVENTED = (
    *("tests.runs", "tests.app", "tests.reporting.terminal"),
    *("tests.ui.test_compare", "tests.ui.test_pages"),
)
"""Tests that write events of their own making to logs"""
KINDS = ("lstm", "gru", "transformer", "mlp", "linear", "tcn", "nhits")


def pytest_configure() -> None:
    """Give signals the handlers that Python has by default, whatever the parent process ignores or
    blocks: `nohup make test &` and some CI systems ignore SIGINT, which child processes inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if number := getattr(signal, name, None):  # Windows lacks most
            signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a module that share a trained run to one worker, which trains it once."""
    from xdist.scheduler import LoadScopeScheduling

    class ModuleScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _shares_fixtures(config.rootpath / file) else nodeid

    return ModuleScheduling(config, log)


@functools.cache
def _shares_fixtures(file: Path) -> bool:
    return 'scope="module"' in file.read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans and kernels that this module's tests save, not those of others or of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        find_library.cache_clear()
        yield
    find_library.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def valid_events(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Every event that a module's runs log or pass on, in this process or another, is as the JSON
    schema says."""
    if request.module.__name__.startswith(INVENTED):
        yield
        return
    base, notify, problems = tmp_path_factory.getbasetemp(), Run.notify, list[str]()
    before = {path.name for path in base.iterdir()}

    def check(self: Run, event: Event) -> None:
        problems.extend(find_problems(format_event(event)))
        notify(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "notify", check)
        yield
    for path in base.iterdir():
        if path.name not in before and not path.is_symlink():
            problems.extend(find_log_problems(path))
    assert not problems, "\n".join(problems[:20])


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the C kernels are compiled, once for all tests."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def native_kernels(native_folder: Path) -> Iterator[None]:
    """The kernels in C for recurrent layers; afterwards they are as if they had not been built."""
    if find_compiler() is None:
        pytest.skip("there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(native_folder))
        find_library.cache_clear()
        assert build_library()
        yield
    find_library.cache_clear()


def slow(*values: Any) -> Any:
    """Parameters of a test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return parameters of a test: `make test` runs the `fast` ones, `make test-slow` the rest."""
    return [value if value in fast else slow(value) for value in values]


def real_file(name: str) -> Path:
    """A real series; the test that needs one is skipped where it is absent."""
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{name} is not here; point SLIPSTREAM_DATA to the folder that holds it")
    return path


def close(got: Any, wanted: Any, *, rel: float = 1e-5) -> None:
    """The one place for tolerances: relative norm, 1e-5 for fp32."""
    got, wanted = (
        torch.as_tensor(
            one if isinstance(one, torch.Tensor) else np.array(one), dtype=torch.float64
        )
        for one in (got, wanted)
    )
    assert got.shape == wanted.shape
    assert torch.isfinite(got).all()
    size = torch.linalg.vector_norm(wanted).clamp(min=1e-12)
    error = float(torch.linalg.vector_norm(got - wanted) / size)
    assert error <= rel, f"relative error {error:.3g} is more than {rel:g}"


def waves(rows: int = 400, *, columns: int = 3, seed: int = 0) -> pa.Table:
    """A small table: a time column and `columns` noisy sines named a, b, c ..."""
    draw = np.random.default_rng(seed)
    time = np.arange(rows)
    table = {"time": time}
    for i in range(columns):
        wave = np.sin(2 * np.pi * time / (12 + 5 * i)) + 0.1 * draw.standard_normal(rows)
        table["abcdefgh"[i]] = 10 * (i + 1) + (i + 1) * wave
    return pa.table(table)


# what the data would decide is given, so that tests of one thing do not depend on another
SMALL: dict[str, Any] = {
    "data": {"time": "time", "context": 16, "horizon": 4, "channels": "together"},
    "model": {
        "kind": "lstm",
        "hidden": 8,
        "layers": 1,
        "heads": 2,
        "normalize": "none",
        "patch": 1,
    },
    "train": {"batch": 32, "epochs": 2, "patience": 10},
    "engine": {"device": "cpu", "threads": 1, "plan": "off"},
}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def small_config(out: Path | str = "runs", **sections: Any) -> Config:
    """A config that trains in a second; sections override single settings."""
    base = {**SMALL, "out": str(out)}
    if sections.get("data", {}).get("scale_by") == "window":  # which normalizes as well
        base = merged(base, {"model": {"normalize": "auto"}})
    return configs.load(merged(base, sections))


def small_dataset(config: Config | None = None, table: Any = None) -> Dataset:
    return datasets.load_dataset(config or small_config(), waves() if table is None else table)


def score_intervals(path: Path, targets: Iterable[str]) -> dict[str, Any]:
    """Return coverage, width and CRPS of the intervals in a file of predictions, as documented: the
    reference for those that summaries state."""
    table, crps = pa.parquet.read_table(path).to_pandas(), []
    inside: dict[str, list[Any]] = {"80": [], "95": []}
    width: dict[str, list[Any]] = {"80": [], "95": []}
    for name in targets:
        truth, loss = table[name], 0.0
        ends = {0.025: "lo95", 0.1: "lo80", 0.5: "predicted", 0.9: "hi80", 0.975: "hi95"}
        weights = (0.0625, 0.2375, 0.4, 0.2375, 0.0625)
        for (level, end), weight in zip(ends.items(), weights, strict=True):
            error = truth - table[f"{name}_{end}"]
            loss += weight * np.maximum(level * error, (level - 1) * error).sum()
        crps.append(2 * loss / truth.abs().sum())
        for level in inside:
            low, high = table[f"{name}_lo{level}"], table[f"{name}_hi{level}"]
            inside[level].append(truth.between(low, high))
            width[level].append((high - low).mean())
    return {
        "coverage": {level: float(np.mean(shares)) for level, shares in inside.items()},
        "width": {level: float(np.mean(means)) for level, means in width.items()},
        "crps": float(np.mean(crps)),
    }


def assert_interval_scores(summary: Mapping[str, Any], path: Path, targets: Iterable[str]) -> None:
    """Compare the scores of intervals in a summary with those of the predictions in a file."""
    wanted = score_intervals(path, targets)
    for level, share in wanted["coverage"].items():  # an end may round to either side of a truth
        assert summary["coverage"][level] == pytest.approx(share, abs=2e-3)
    assert summary["width"] == pytest.approx(wanted["width"], rel=1e-5)
    assert summary["crps"] == pytest.approx(wanted["crps"], rel=1e-5)
