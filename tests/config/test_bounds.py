"""Numbers that nothing could be computed with are refused before anything is built or read."""

from __future__ import annotations

import math
import typing
from typing import Annotated

import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream import UserError
from slipstream import config as configs
from slipstream.config import Config
from slipstream.config.base import Section
from slipstream.config.search_space import make_grid
from tests.conftest import small_config, waves


def list_settings(section=Config, path=()):
    """Every setting that accepts a number, as its path and the type of the number."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from list_settings(kind, (*path, name))
            continue
        kinds = {kind, *(typing.get_args(kind) if typing.get_origin(kind) is not tuple else ())}
        kinds |= {typing.get_args(one)[0] for one in kinds if typing.get_origin(one) is Annotated}
        for number in (int, float):
            if number in kinds and name != "na":
                yield (*path, name), number


SETTINGS = list(list_settings())
ENDLESS = {
    *("data.gap_tolerance", "engine.checkpoint_minutes", "tune.minutes"),
    *("train.huber_delta", "train.clip", "train.minutes"),
}
"""Settings of which `inf` means no limit"""


def nest(path, value):
    for name in reversed(path):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("path", "kind"),
    SETTINGS,
    ids=lambda one: ".".join(one) if isinstance(one, tuple) else one.__name__,
)
def test_every_number_has_a_bound(path, kind):
    name, value = ".".join(path), 10**30 if kind is int else math.inf
    if name in ENDLESS:
        configs.load(nest(path, value))
        return
    with pytest.raises(
        UserError, match=rf"{name} is {value}; it should be (at most|less than|a fin)"
    ):
        configs.load(nest(path, value))


def test_the_walk_finds_the_settings():
    names = {".".join(path) for path, _ in SETTINGS}
    assert {"train.repeats", "model.layers", "model.hidden", "train.lr", "tune.trials"} <= names
    assert len(names) > 60


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"train": {"repeats": 1_000_000}},
            "train.repeats is 1000000; it should be at most 10,000",
        ),
        ({"model": {"layers": 1_000_000}}, "model.layers is 1000000; it should be at most 1,000"),
        (
            {"model": {"hidden": 60_000, "layers": 900}},
            r"the network would have [\d,]+ parameters \(model.hidden = 60000, model.layers = 900, "
            r"data.horizon = 4\), and training it takes [\d,]+ GB at least, but this machine has "
            r"[\d,]+ GB; lower model.hidden or model.layers or data.horizon",
        ),
        (
            {"model": {"hidden": 4_000, "layers": 2}, "train": {"repeats": 10_000}},
            r"train.repeats = 10,000 trains 10,000 models of [\d,]+ parameters",
        ),
        (
            {"engine": {"data_parallel": 1_000}},
            r"engine.data_parallel is 1,000; on \d+ CPU cores? it can be \d+ at most",
        ),
    ],
    ids=["repeats", "layers", "network", "models", "processes"],
)
def test_what_cannot_fit_is_refused_before_it_is_built(tmp_path, sections, told):
    path = tmp_path / "waves.parquet"
    pq.write_table(waves(200), path)
    sections = {"data": {"path": str(path)}} | sections
    with pytest.raises(UserError, match=told):
        slipstream.train(small_config(tmp_path / "runs", **sections))
    assert not list(tmp_path.glob("runs/*"))


def test_a_grid_of_too_many_points_is_refused_before_any_of_them_is_made():
    many = {"low": 0.001, "high": 0.9, "step": 0.0001}
    tune = {"sampler": "grid", "space": {"train.lr": many, "model.dropout": many}}
    space = configs.load({"tune": tune}).tune.space
    with pytest.raises(UserError, match=r'tune.space."model.dropout" makes more than 1,000,000'):
        make_grid(space)


@pytest.mark.parametrize("bounds", [(0, math.inf), (-math.inf, 1), (math.nan, 1), (0, 1e300)])
def test_a_range_that_nothing_can_be_drawn_from_is_refused(bounds):
    low, high = bounds
    with pytest.raises(UserError, match=r"train\.lr.*low(,| and) high.* (finite|lie within)"):
        configs.load({"tune": {"space": {"train.lr": {"low": low, "high": high}}}})
