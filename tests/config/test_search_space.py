"""The search space: names and values are checked, params become configs."""

from __future__ import annotations

import pytest

import slipstream
from slipstream import UserError
from slipstream import config as configs
from slipstream.config import Range
from slipstream.config import search_space as spaces
from slipstream.search.study import make_distributions
from tests.conftest import KINDS
from tests.search.searches import make_settings


def test_every_kind_of_entry():
    config = configs.load(
        {
            "tune": {
                "space": {
                    "train.lr": {"low": 1e-4, "high": 1e-2, "log": True},
                    "model.hidden.0": {"low": 64, "high": 250, "step": 16},
                    "model.dropout": {"low": 0.0, "high": 0.5, "step": 0.25},
                    "model.kind": ["lstm", "gru"],
                    "data.context": [24, 48],
                    "model.hidden": [[8, 4], [16, 8]],
                }
            }
        }
    )
    found = make_distributions(spaces.make_space(config))
    assert found["train.lr"].log
    assert (found["model.hidden.0"].high, found["model.hidden.0"].step) == (240, 16)
    assert found["model.dropout"].step == 0.25
    assert found["model.kind"].choices == ("lstm", "gru")
    one = spaces.apply_params(
        config,
        config.tune.space,
        {"model.hidden": "[8, 4]", "model.kind": "gru", "train.lr": 0.005, "data.context": 48},
    )
    assert one.model.sizes == (8, 4)
    assert (one.model.kind, one.train.lr, one.data.context) == ("gru", 0.005, 48)


def test_noise_by_column_activations_and_low_rates_can_be_searched():
    space = {
        "augment.jitter.a": {"low": 0.01, "high": 0.1},
        "model.activation": ["relu", "silu"],
        "train.exploit_epochs": [0, 5],
    }
    settings = {"model": {"kind": "mlp"}, "augment": {"jitter": {"b": 0.2}}}
    config = configs.load(settings | {"tune": {"space": space}})
    params = {"augment.jitter.a": 0.05, "model.activation": "silu", "train.exploit_epochs": 5}
    one = spaces.apply_params(config, spaces.make_space(config), params)
    assert one.augment.jitter == {"a": 0.05, "b": 0.2}
    assert (one.model.activation, one.train.exploit_epochs) == ("silu", 5)


def test_the_default_space_fits_every_kind_of_model():
    for kind in KINDS:
        config = configs.load({"model": {"kind": kind}})
        space = spaces.make_space(config)
        for name, entry in space.items():
            for value in (entry.low, entry.high) if isinstance(entry, Range) else entry:
                assert configs.replace_settings(config, {name: value})


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ({"kind": "nhits", "stacks": 6}, {"model.stacks": (3, 6)}),
        ({"kind": "tcn", "kernel_size": 1_024}, {"model.kernel_size": (512, 1_024)}),
        ({"kind": "tcn"}, {"model.kernel_size": (1, 3, 6)}),
    ],
)
def test_the_default_space_has_no_value_that_a_setting_refuses(model, values):
    space = spaces.make_space(configs.load({"model": model}))
    assert values.items() <= space.items()


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"train.lrr": [1, 2]}, 'did you mean "train.lr"'),
        ({"data.horizon": [1, 2]}, "changes the horizon"),
        ({"data.scale": ["standard", "none"]}, "units of the score"),
        ({"seed": [1, 2]}, "chance"),
        ({"engine.precision": ["fp32", "bf16"]}, "does not change the model"),
        ({"train.loss": ["mse", "mae"]}, "tune.metric"),
        ({"train.lr": [0.1, -1]}, "greater than 0"),
        ({"train.batch": [32, "auto"]}, "list numbers"),
        ({"model.hidden.5": [4, 8]}, "counted from 0"),
    ],
)
def test_a_wrong_space_is_named_before_a_folder_is_made(tmp_path, space, told):
    with pytest.raises(UserError, match=told):
        slipstream.tune(make_settings(tmp_path, tune={"space": space}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("base", "space"),
    [
        ({"kind": "transformer", "hidden": 8}, {"model.hidden": [6, 8], "model.heads": [2, 4]}),
        ({"kind": "mlp"}, {"model.kind": ["mlp", "gru"], "model.bidirectional": [True, False]}),
        ({"patch": 2}, {"data.context": [8, 9], "model.patch": [2, 3]}),
        ({}, {"train.lr": [0.01, 0.1], "train.lr_min": [0.0, 0.05]}),
        ({"bidirectional": True}, {"model.kind": ["lstm", "mlp"]}),
    ],
)
def test_values_that_only_conflict_with_other_settings_are_accepted(tmp_path, base, space):
    config = configs.load(make_settings(tmp_path, model=base, tune={"space": space}))
    assert list(spaces.make_space(config)) == list(space)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"train.lr": [0.1, -1]}, r'"train\.lr": train\.lr is -1'),
        ({"train.quantiles": [[0.5, 0.1], [0.1, 0.5]]}, "must increase"),
        ({"model.hidden.0": [0, 4]}, r'"model\.hidden\.0": model\.hidden: entry 1 is'),
        ({"data.context": [8, 9]}, r"not a multiple of model\.patch = 2"),
        ({"model.options.width": [4, 8]}, "your own class"),
    ],
)
def test_a_value_that_fits_no_other_choice_is_refused(tmp_path, space, told):
    """Whatever else is searched."""
    kinds = {"model.kind": ["lstm", "gru"]}
    settings = make_settings(tmp_path, model={"patch": 2}, tune={"space": kinds | space})
    with pytest.raises(UserError, match=told):
        spaces.make_space(configs.load(settings))


def test_a_grid_needs_finitely_many_values(tmp_path):
    with pytest.raises(UserError, match=r'"train\.lr"'):
        slipstream.tune(make_settings(tmp_path, tune={"sampler": "grid"}))


def test_noise_by_column_is_searched_from_a_config_that_spells_out_its_defaults():
    space = {"augment.jitter.a": [0.1, 0.2]}
    config = configs.load({"augment": {"jitter": 0.0}, "tune": {"space": space}})
    one = spaces.apply_params(config, spaces.make_space(config), {"augment.jitter.a": 0.2})
    assert one.augment.jitter == {"a": 0.2}
    config = configs.load({"augment": {"jitter": 0.3}, "tune": {"space": space}})
    with pytest.raises(UserError, match=r"augment\.jitter is 0\.3 for all"):
        spaces.make_space(config)


def test_a_search_refuses_one_model_over_several_processes():
    config = configs.load({"engine": {"data_parallel": 2}})
    with pytest.raises(UserError, match=r"data_parallel is not supported in a search; .*--workers"):
        spaces.check_config(config)
