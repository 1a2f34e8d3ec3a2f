import pytest

from slipstream import Config, config
from tests.conftest import KINDS, small_config


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"model": {"kind": "linear", "patch": 16}},
            'model.patch = 16 has no effect: model.kind = "linear" reads all rows of a window at '
            "once",
        ),
        ({"model": {"kind": "mlp", "pool": "mean"}}, 'model.pool = "mean" has no effect'),
        ({"model": {"kind": "linear", "hidden": 64}}, "model.hidden = 64 has no effect"),
        ({"model": {"heads": 8}}, "model.heads = 8 has no effect: it is for transformer"),
        ({"model": {"kind": "nets:Mixer", "layers": 3}}, "your own class has layers of its own"),
        ({"model": {"layers": 1, "dropout": 0.3}}, "model.dropout = 0.3 has no effect"),
        ({"train": {"momentum": 0.5}}, 'it applies only with train.optimizer = "sgd", not "adamw"'),
        ({"train": {"quantiles": [0.5]}}, "train.quantiles = [0.5] has no effect"),
        ({"train": {"schedule": "step", "lr_min": 1e-5}}, "train.lr_min = 1e-05 has no effect"),
        ({"train": {"freeze_epochs": 3}}, "train.init_from, which is not set"),
        ({"augment": {"warp_chance": 0.1}}, "augment.warp is off"),
        ({"data": {"gap_tolerance": 4.0}}, "it is about data.time, which is not set"),
    ],
)
def test_a_setting_without_effect_is_noted(sections, said):
    (note,) = config.list_unused(Config(**sections))
    assert said in note


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_every_kind_have_an_effect(kind):
    assert config.list_unused(Config(model={"kind": kind})) == []


def test_settings_that_a_search_over_kinds_may_need_are_not_noted():
    tune = {"space": {"model.kind": ["lstm", "transformer"]}}
    assert config.list_unused(Config(model={"heads": 8}, tune=tune)) == []
    assert config.list_unused(small_config(model={"kind": "transformer", "patch": 4})) == []
