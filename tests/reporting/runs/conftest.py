"""A folder of runs, made once and copied."""

from __future__ import annotations

import shutil

import pytest

import slipstream
from tests.conftest import small_config, waves


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Two finished runs: one model, and three repeats of another."""
    out = tmp_path_factory.mktemp("trained")
    waves().to_pandas().to_csv(out / "table.csv", index=False)
    data = {"path": str(out / "table.csv"), "targets": ["a"]}
    for name, kind, repeats in (("one", "mlp", 1), ("three", "linear", 3)):
        train = {"epochs": 1, "repeats": repeats}
        config = small_config(out, name=name, data=data, model={"kind": kind}, train=train)
        slipstream.train(config)
    return out


@pytest.fixture
def out(trained, tmp_path, monkeypatch):
    """A working folder whose runs/ holds `one` (older) and `three`, by plain names."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs"
    for name, day in (("one", 1), ("three", 2)):
        (source,) = trained.glob(f"{name}-*")
        shutil.copytree(source, out / f"{name}-2026010{day}T000000Z")
    return out
