from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.config import Config, Data, Train
from slipstream.config.base import read_descriptions
from slipstream.config.train import upgrade_plan

ROOT = Path(__file__).parents[2]


def message(settings, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        configs.load(settings, overrides)
    return str(caught.value)


def test_the_smallest_file_names_only_the_data(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[data]\npath = "table.csv"\n')
    config = configs.load(path)
    assert config.name == "mine"
    assert config.data.path == str(tmp_path / "table.csv")
    assert config.model.kind == "lstm"


def test_the_contract_of_defaults():
    config = Config()
    assert (config.data.context, config.data.horizon, config.data.stride) == (96, 24, 1)
    assert (config.model.hidden, config.model.layers, config.model.dropout) == (128, 2, 0.1)
    assert (config.train.lr, config.train.batch, config.train.epochs) == (1e-3, 256, 50)
    assert (config.train.optimizer, config.train.schedule) == ("adamw", "cosine")
    assert (config.engine.device, config.engine.precision) == ("auto", "auto")
    assert config.engine.log_every == 50


def test_a_relative_data_path_is_found_beside_the_config_then_in_the_working_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "a.toml"
    path.write_text('[data]\npath = "table.csv"\n')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").touch()
    assert configs.load(path).data.path == str(tmp_path / "table.csv")
    (tmp_path / "configs" / "table.csv").touch()
    assert configs.load(path).data.path == str(tmp_path / "configs" / "table.csv")


def test_every_path_is_absolute_wherever_it_comes_from(tmp_path, monkeypatch):
    """So that a run's config, and what workers are sent, is the same from every folder."""
    monkeypatch.chdir(tmp_path)
    named = {"path": ["a.csv", "b.csv"], "labels": "c.csv", "task": "classify"}
    wanted = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    (tmp_path / "job.toml").write_text("")
    overrides = ["data.path=['a.csv', 'b.csv']", "data.labels=c.csv", "data.task=classify"]
    for config in (
        configs.load({"data": named}),
        configs.load({"data": Data(**named)}),
        configs.load(Config(data=Data(**named), train=Train(loss="cross_entropy"))),
        configs.load(tmp_path / "job.toml", overrides),
    ):
        assert config.data.paths == wanted
        assert config.data.labels == str(tmp_path / "c.csv")
    assert configs.load({}, ["data.path=simulated:cell"]).data.path == "simulated:cell"
    assert configs.load({}, ["data.path=x/../y.csv"]).data.path == str(tmp_path / "x/../y.csv")
    assert configs.load({"data": {"path": ""}}).data.path == ""


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("train.lr=0.01", lambda c: c.train.lr == 0.01),
        ("train.epochs = 3", lambda c: c.train.epochs == 3),
        ("model.kind=gru", lambda c: c.model.kind == "gru"),
        ('model.kind="gru"', lambda c: c.model.kind == "gru"),
        ("model.hidden=[64, 32]", lambda c: c.model.sizes == (64, 32)),
        ("data.inputs=['a', 'b']", lambda c: c.data.inputs == ("a", "b")),
        ("data.split={rows=[5, 3, 2]}", lambda c: c.data.split.rows == (5, 3, 2)),
        ("data.gap_tolerance=inf", lambda c: c.data.gap_tolerance == float("inf")),
        ("train.clip=off", lambda c: c.train.clip == "off"),
        ("engine.capture=false", lambda c: c.engine.capture is False),
        ("data.where.ambient=25", lambda c: c.data.where == {"ambient": 25}),
        ("name=2024-01-01", lambda c: c.name == "2024-01-01"),
    ],
)
def test_overrides(override, found):
    assert found(configs.load({}, [override]))


def test_overrides_do_not_change_the_mapping_they_were_given():
    settings = {"train": {"lr": 0.1}}
    configs.load(settings, ["train.lr=0.2"])
    assert settings == {"train": {"lr": 0.1}}


@pytest.mark.parametrize("bad", ["train.lr", "=3", "train..lr=3", ""])
def test_an_override_that_is_none(bad):
    assert "section.key=value" in message({}, bad)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": {"learning_rate": 1}}, "train.learning_rate is not a setting"),
        ({"train": {"epoch": 1}}, 'did you mean "epochs"?'),
        ({"trian": {"lr": 1.0}}, 'did you mean "train"?'),
        ({"train": {"hidden": 3}}, 'did you mean "model.hidden"?'),
        ({"data": {"split": {"fold": 3}}}, "data.split.fold is not a setting"),
        ({"train": {"lr": "fast"}}, 'train.lr is "fast"'),
        ({"train": {"lr": 0}}, "greater than 0"),
        ({"train": {"batch": 2.5}}, "train.batch is 2.5"),
        ({"train": {"batch": "256"}}, 'train.batch is "256"'),
        ({"train": {"batch": True}}, "train.batch is true"),
        ({"model": {"kind": "rnn"}}, '"lstm", "gru", "transformer"'),
        ({"model": {"dropout": 1.0}}, "less than 1"),
        ({"model": {"hidden": []}}, "model.hidden"),
        ({"model": {"hidden": [8, 8], "layers": 3}}, "model.layers is 3"),
        ({"model": {"kind": "transformer", "hidden": 10}}, "is not a multiple of model.heads"),
        ({"model": {"kind": "mlp", "bidirectional": True}}, "bidirectional is for lstm and gru"),
        ({"data": {"context": 0}}, "data.context is 0"),
        ({"data": {"context": 30}, "model": {"patch": 16}}, "use 16 or 32"),
        ({"data": {"horizon": 0}}, "data.targets must name what to estimate"),
        ({"data": {"horizon": 0, "targets": ["a"], "inputs": ["a", "b"]}}, "read its own answer"),
        ({"data": {"inputs": []}}, "data.inputs is empty"),
        ({"data": {"targets": ["a", "a"]}}, "names a column twice"),
        ({"data": {"split": {"train": 0.9, "val": 0.2, "test": 0.2}}}, "add up to 1.3"),
        ({"data": {"split": {"train": 0.9}}}, "give all of train, val and test"),
        ({"data": {"split": {"rows": [1, 2]}}}, "three counts"),
        ({"data": {"split": {"by": "x", "val": ["a"]}}}, "both val and test"),
        ({"data": {"split": {"rows": [1, 2, 3], "by": "x"}}}, "not several"),
        ({"data": {"split": {"walk_forward": 3, "by": "x"}}}, "not several"),
        ({"data": {"split": {"walk_forward": 3, "rows": [1, 2, 3]}}}, "not several"),
        ({"data": {"split": {"walk_forward": 3, "folders": True}}}, "not several"),
        ({"data": {"split": {"walk_forward": 0}}}, "data.split.walk_forward is 0"),
        ({"data": {"split": {"walk_forward": 3, "train": 0.7}}}, "remove train"),
        ({"data": {"split": {"walk_forward": 3, "val": ["a"]}}}, "val and test are fractions"),
        ({"data": {"split": {"walk_forward": 3, "val": 0.5, "test": 0.5}}}, "no rows to train on"),
        ({"data": {"split": {"walk_forward": 3, "window": "sliding"}}}, '"expanding" or "rolling"'),
        ({"data": {"split": {"walk_forward": 3, "purge": -1}}}, "data.split.purge is -1"),
        (
            {"data": {"split": {"rows": [1, 2, 3], "purge": 2}}},
            "purge applies only with walk_forward",
        ),
        (
            {"data": {"split": {"folders": True, "embargo": 2}}},
            "embargo applies only with walk_forward",
        ),
        ({"data": {"split": {"rows": [1, 2, 3], "window": "rolling"}}}, "window applies only with"),
        ({"data": {"split": {"walk_foward": 3}}}, 'did you mean "walk_forward"?'),
        ({"engine": {"device": "tpu"}}, 'engine.device is "tpu"'),
        ({"tune": {"direction": "maximize"}}, "tune.direction is not a setting"),
        ({"train": {"quantiles": [0.9, 0.1]}}, "must increase"),
        ({"train": {"lr": 1e-3, "lr_min": 1e-2}}, "train.lr_min = 0.01 is above"),
        ({"name": "a/b"}, 'name is "a/b"'),
    ],
)
def test_what_is_wrong_is_named(settings, said):
    assert said in message(settings)


def test_a_missing_or_broken_file_is_named(tmp_path):
    assert "there is no such config file" in message(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("[data\n")
    assert "is not valid TOML" in message(tmp_path / "bad.toml")
    assert "line 1" in message(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    assert "is not UTF-8" in message(tmp_path / "latin.toml")
    assert "is a folder; name a config file" in message(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    assert "rows.csv: is a table, not a config" in message(tmp_path / "rows.csv")


def test_two_mistakes_are_both_told():
    said = message({"train": {"lr": -1, "bach": 3}})
    assert "train.lr is -1" in said
    assert 'did you mean "batch"?' in said


def test_what_is_written_reads_back_the_same():
    for config in (Config(), configs.load_demo(), configs.load({"train": {"clip": "off"}})):
        assert Config.model_validate(tomllib.loads(configs.to_toml(config))) == config


def test_walking_forward_needs_no_more_than_the_number_of_folds():
    split = configs.load({"data": {"split": {"walk_forward": 6}}}).data.split
    assert (split.val, split.test, split.train) == (0.1, 0.2, None)
    assert (split.window, split.purge, split.embargo) == ("expanding", 0, 0)
    assert configs.load({}, ["data.split.walk_forward=6"]).data.split == split


@given(
    folds=st.integers(1, 50),
    shares=st.one_of(st.just({}), st.fixed_dictionaries({"val": st.floats(0.01, 0.4)})),
    purge=st.integers(0, 99),
    embargo=st.integers(0, 99),
    window=st.sampled_from(["expanding", "rolling"]),
)
def test_a_walk_survives_its_file(folds, shares, purge, embargo, window):
    split = {"walk_forward": folds, "purge": purge, "embargo": embargo, "window": window} | shares
    config = configs.load({"data": {"split": split}})
    for only_set in (False, True):
        text = configs.to_toml(config, only_set=only_set)
        assert Config.model_validate(tomllib.loads(text)) == config


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    lr=st.floats(min_value=1e-9, max_value=10),
    hidden=st.one_of(st.integers(1, 999), st.lists(st.integers(1, 999), min_size=1, max_size=5)),
    where=st.dictionaries(st.text(min_size=1), st.one_of(st.text(), st.integers(-9, 9), finite)),
    inputs=st.lists(st.text(min_size=1), min_size=1, unique=True),
)
def test_any_config_survives_its_file(lr, hidden, where, inputs):
    config = configs.load(
        {
            "data": {"where": where, "inputs": inputs},
            "model": {"hidden": hidden},
            "train": {"lr": lr},
        }
    )
    assert Config.model_validate(tomllib.loads(configs.to_toml(config))) == config


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().train.lr = 2.0


def test_every_setting_is_documented():
    def sections(section):
        yield section
        for field in section.model_fields.values():
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                yield from sections(field.annotation)

    for section in sections(Config):
        assert section.__doc__
        texts = read_descriptions(section)
        for name, field in section.model_fields.items():
            assert texts.get(name) or hasattr(field.annotation, "model_fields"), name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_is_valid(path):
    assert configs.load(path).name == path.stem


@pytest.mark.parametrize(
    ("old", "new"),
    [("persistent", "cudnn"), ("standard", "cudnn"), ("off", "slipstream")],
)
def test_the_old_name_of_engine_rnn_is_accepted_with_a_note(old, new, tmp_path):
    config = configs.load({"engine": {"cudnn": old}})
    assert config == configs.load({"engine": {"rnn": new}})
    note = f'engine.cudnn = "{old}" is now engine.rnn = "{new}"'
    assert configs.list_unused(config)[0].startswith(note)
    for kept in (configs.load(config), configs.replace_settings(config, {"train.lr": 0.1})):
        assert configs.list_unused(kept)[0].startswith(note)
    written = tmp_path / "config.toml"
    written.write_text(configs.to_toml(config))
    assert "cudnn =" not in written.read_text()
    again = configs.load(written)
    assert again.engine == config.engine
    assert not configs.list_unused(again)
    overridden = configs.load(written, (f"engine.cudnn={old}",))
    assert overridden.engine.rnn == new


def test_the_default_of_the_old_name_is_not_noted():
    """The config of an older run spells it out."""
    config = configs.load({"engine": {"cudnn": "auto"}})
    assert config == configs.load({})
    assert not configs.list_unused(config)


def test_both_names_of_engine_rnn_are_refused_unless_they_agree():
    assert (
        configs.load({"engine": {"cudnn": "off", "rnn": "slipstream"}}).engine.rnn == "slipstream"
    )
    with pytest.raises(UserError, match=r"old name of engine\.rnn, and both are set; remove"):
        configs.load({"engine": {"cudnn": "off", "rnn": "torch"}})
    with pytest.raises(UserError, match=r'engine\.rnn is "fast"; it should be "auto"'):
        configs.load({"engine": {"cudnn": "fast"}})


def test_a_preset_of_an_old_config_is_left_out_with_a_note():
    config = configs.load({"engine": {"preset": "classic", "workers": 3}})
    assert config == configs.load({"engine": {"workers": 3}})
    (note,) = configs.list_unused(config)
    assert note.startswith('engine.preset = "classic" has no effect: presets belong to slipstream')
    assert not configs.list_unused(configs.load({"engine": {"preset": "auto"}}))


def test_a_plan_of_an_old_run_is_read_by_the_names_of_today():
    old = {"device": "cuda", "cudnn": ["persistent", "standard"], "reasons": {"cudnn": "measured"}}
    new = {"device": "cuda", "rnn": ["cudnn", "cudnn-standard"], "reasons": {"rnn": "measured"}}
    assert upgrade_plan(old) == new == upgrade_plan(new)
    on_cpu = upgrade_plan(old | {"device": "cpu", "cudnn": ["persistent", "off"]})
    assert on_cpu["rnn"] == ["torch", "slipstream"]


def test_a_run_of_version_0_1_may_say_that_a_search_minimizes():
    config = configs.load({"tune": {"direction": "minimize", "trials": 3}})
    assert config == configs.load({"tune": {"trials": 3}})
    assert "direction" not in tomllib.loads(configs.to_toml(config))["tune"]


def test_settings_are_replaced_by_dotted_name_or_by_section():
    config = configs.load({"engine": {"threads": 2}, "model": {"hidden": 8, "layers": 2}})
    by_name = configs.replace_settings(config, {"train.lr": 0.01, "model.hidden.1": 16})
    assert (by_name.train.lr, by_name.model.hidden) == (0.01, (8, 16))
    by_section = configs.replace_settings(config, train={"lr": 0.01}, engine={"plan": "off"})
    assert (by_section.train.lr, by_section.engine.plan, by_section.engine.threads) == (
        0.01,
        "off",
        2,
    )
    reset = configs.replace_settings(config, reset_engine=True, engine={"plan": "off"})
    assert (reset.engine.plan, reset.engine.threads) == ("off", "auto")
    with pytest.raises(UserError, match='lr is "fast"'):
        configs.replace_settings(config, train={"lr": "fast"})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"repeats": 3}}, r"train.repeats = 3 trains several.*: train with --workers"),
        (
            {"train": {"state": "carried", "batch": 8}, "model": {"kind": "lstm"}},
            r'does not work with train.state = "carried"',
        ),
        ({"engine": {"home": "stream"}}, r'does not work with engine.home = "stream"'),
        ({"engine": {"device": "cuda:1"}}, r'names one; set engine.device = "cuda"'),
    ],
)
def test_what_several_processes_cannot_train_is_refused(sections, message):
    engine = {"data_parallel": 2} | sections.get("engine", {})
    with pytest.raises(UserError, match=message):
        configs.load(sections | {"engine": engine})


TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["inf", "-inf", "nan", '"inf"', '""nan""']))
SETTING_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(SETTING_VALUES)
def test_every_value_comes_back_from_strict_json(value):
    text = runs.to_json(configs.to_json_values(value))
    assert repr(configs.from_json_values(json.loads(text))) == repr(value)


def test_a_config_comes_back_from_strict_json():
    config = Config.model_validate(
        {
            "data": {
                "path": ["a.csv", "inf"],
                "gap_tolerance": math.inf,
                "na": [-200, "inf", math.inf, math.nan],
                "where": {"cell": ["nan", -math.inf], "x": 1.5},
                "split": {"walk_forward": 3},
                "prepare": [{"step": "clip", "columns": ["inf"], "low": -1.5}],
            },
            "train": {"clip": math.inf, "minutes": math.inf, "quantiles": [0.1, 0.5]},
            "tune": {"space": {"train.clip": [1.0, math.inf], "model.hidden": [[8, 4], 16]}},
        }
    )
    values = json.loads(runs.to_json(configs.to_json_values(config)))
    again = Config.model_validate(configs.from_json_values(values))
    assert configs.to_toml(again) == configs.to_toml(config)
    assert repr(again) == repr(config)


def test_infinity_as_json_has_it_is_accepted_where_only_numbers_are():
    config = configs.load({"data": {"gap_tolerance": "inf"}, "train": {"clip": "inf"}})
    assert (config.data.gap_tolerance, config.train.clip) == (math.inf, math.inf)
    assert "should be a number" in message({"data": {"gap_tolerance": "-inf"}})


@pytest.mark.parametrize("setting", ["train.lr", "train.exploit_lr", "predict.filter.cutoff_hz"])
def test_a_rate_is_finite(setting):
    assert f"{setting} is inf; it should be a finite number" in message({}, f"{setting}=inf")
