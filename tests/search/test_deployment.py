"""What candidates cost where they run: the same as an export states, from shapes alone."""

from __future__ import annotations

import pytest

import slipstream
from slipstream import config as configs
from slipstream.models import custom
from slipstream.search.deployment import NOT_MEASURED, measure_network
from slipstream.search.packs import DatasetCache
from tests.search.test_auto import make_settings, make_table


def make_job(tmp_path, **model):
    settings = make_settings(tmp_path, context=12, horizon=2)
    settings["model"] = {"hidden": 8, "layers": 1, "normalize": "last", **model}
    settings["train"] = {"epochs": 1, "batch": 64}
    return settings


@pytest.mark.parametrize("kind", ["gru", "mlp", "linear"])
def test_flash_and_ram_are_those_of_the_export(kind, tmp_path):
    settings, table = make_job(tmp_path, kind=kind), make_table(400)
    config = configs.load(settings)
    costs = measure_network(config, DatasetCache(config, table).get(config))
    trained = slipstream.train(settings, table, quiet=True)
    export = slipstream.export(trained.run, to="c", out=tmp_path / "c", data=table)
    sizes, levels = export["sizes"], 2 * 2 * 8  # a single model of train has no intervals
    assert costs["flash_bytes"] == sizes["flash_bytes"] + levels
    assert costs["ram_bytes"] == sizes["scratch_bytes"] + sizes["state_bytes"]
    assert costs["parameters"] == trained.summary["parameters"]
    assert costs["predict_us"] > 0


def test_a_kind_without_c_has_no_sizes(tmp_path):
    config = configs.load(make_job(tmp_path, kind="tests.models.nets:Mixer"))
    custom.allow_classes(config)
    costs = measure_network(config, DatasetCache(config, make_table(400)).get(config))
    assert costs["flash_bytes"] is costs["ram_bytes"] is None
    assert costs["predict_us"] > 0
    assert all(value is None for value in NOT_MEASURED.values())


def test_series_with_scales_of_their_own_have_no_sizes(tmp_path):
    settings = make_job(tmp_path, kind="gru")
    settings["data"]["scale_by"] = "series"
    config = configs.load(settings)
    costs = measure_network(config, DatasetCache(config, make_table(400)).get(config))
    assert costs["flash_bytes"] is None
