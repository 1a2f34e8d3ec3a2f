from __future__ import annotations

import pickle

import pytest

from slipstream import UserError
from slipstream import config as configs
from slipstream.config import OptionText
from slipstream.config.errors import find_line
from slipstream.config.model import SPECS


@pytest.fixture
def refuse(tmp_path):
    """Load a TOML text, with overrides, and return the message that refuses it."""

    def load(text, *overrides):
        path = tmp_path / "job.toml"
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            configs.load(path, overrides)
        return str(caught.value).replace(str(tmp_path) + "/", "")

    return load


KINDS = ", ".join(f'"{kind}"' for kind in SPECS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[data]\ntargets = "OT"',
            'job.toml, line 2: data.targets is "OT"; it should be a list, as in ["OT"]',
        ),
        (
            "# a comment\n[train]\nepochs = 1.5",
            'job.toml, line 3: train.epochs is 1.5; it should be an integer or "auto"',
        ),
        (
            '[model]\nkind = "lstmm"',
            f'job.toml, line 2: model.kind is "lstmm"; did you mean "lstm"? It should be {KINDS} '
            'or your own class, as in "module:Class"',
        ),
        (
            '[train]\nloss = "MSE"',
            'job.toml, line 2: train.loss is "MSE"; did you mean "mse"? It should be "mse", '
            '"mae", "huber", "quantile", "cross_entropy", "focal" or "auto"',
        ),
        (
            '[engine]\ndevice = "gpu"',
            'job.toml, line 2: engine.device is "gpu"; did you mean "cuda"? It should be "auto", '
            '"cpu", "cuda" or "cuda:1"',
        ),
        (
            '[model]\nhidden = "64"',
            'job.toml, line 2: model.hidden is "64"; it should be an integer or a list; write 64 '
            "without quotes",
        ),
        (
            '[model]\nhidden = [8, "a"]',
            'job.toml, line 2: model.hidden: entry 2 is "a"; it should be an integer',
        ),
        (
            '[model]\nkind = "gbm"',
            'job.toml, line 2: model.kind = "gbm" is a baseline, which every run fits beside its '
            "network and slipstream auto may answer with; it is not trained. Choose lstm, gru, "
            "transformer, tcn, nhits, mlp, linear",
        ),
        (
            "[train]\nbatch_size = 3",
            'job.toml, line 2: train.batch_size is not a setting; did you mean "batch"?',
        ),
        (
            "[train]\nlr = -1",
            'job.toml, line 2: train.lr is -1; it should be greater than 0 or "auto"',
        ),
        (
            "[data]\nsplit = { rows = [1, 2] }",
            "job.toml, line 2: data.split.rows takes three counts: training, validation and test "
            "rows, as in [8640, 2880, 2880]",
        ),
        (
            '[tune.space]\n"train.lr" = { min = 1, high = 2 }',
            'job.toml, line 1: tune.space."train.lr": min is not a setting; did you mean "low"?',
        ),
        (
            "[data]\ncontext = 30\n[model]\npatch = 16",
            "job.toml, line 2: data.context = 30 is not a multiple of model.patch = 16; use 16 or "
            "32",
        ),
        (
            "[train]\nlr = 0\nbatch = 0",
            'job.toml, line 2: train.lr is 0; it should be greater than 0 or "auto"\n'
            '  job.toml, line 3: train.batch is 0; it should be at least 1 or "auto"',
        ),
    ],
)
def test_a_message_names_the_line_the_setting_and_what_it_takes(refuse, text, message):
    assert refuse(text) == message


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("path = x.csv", 'invalid value; it reads "path = x.csv"; text needs quotes: path = "x'),
        ('path = "C:\\data"', "in paths write / for \\, or put them in single quotes"),
        ('path: "x.csv"', "write key = value"),
        ("path = True", "write path = true"),
        ("context = 1\ncontext = 2", "line 2: is not valid TOML: cannot overwrite a value"),
        ('path = "x.csv', "close the quote"),
        ('inputs = ["a"', "close the list with ]"),
    ],
)
def test_a_text_that_is_not_toml_gets_its_line_and_a_fix(refuse, text, fix):
    message = refuse(text)
    assert message.startswith("job.toml, line ")
    assert fix in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=fast", 'train.lr is "fast"; it should be a number or "auto"'),
        ("train.lr", '"train.lr" is not of the form section.key=value, as in train.lr=0.001'),
        (
            "data.context=30",
            "data.context = 30 is not a multiple of model.patch = 16; use 16 or 32",
        ),
        (
            "data.inputs=[a]",
            'data.inputs is "[a]"; it should be a list; quote its entries: ["a", "b"]',
        ),
        ("lr=3", 'lr is not a setting; did you mean "train.lr"?'),
    ],
)
def test_an_override_is_named_instead_of_the_file(refuse, override, message):
    text = "[data]\ncontext = 32\n[model]\npatch = 16"
    assert refuse(text, override) == f"overrides: {message}"
    assert refuse(text, OptionText(override)) == f"--set: {message}"


def test_an_option_stays_one_in_another_process():
    text = pickle.loads(pickle.dumps(OptionText("a=1", "--probe-set")))
    assert (text, text.option) == ("a=1", "--probe-set")


def test_the_line_of_a_setting():
    text = (
        'seed = 1\ntrain.lr = 2\n[data]\nsplit = { rows = [1] }\n[tune.space]\n"model.hidden" = 1'
    )
    assert find_line(text, ("seed",)) == 1
    assert find_line(text, ("train", "lr")) == 2
    assert find_line(text, ("data",)) == 3
    assert find_line(text, ("data", "split", "rows")) == 4
    assert find_line(text, ("tune", "space", "model.hidden")) == 6
    assert find_line(text, ("train", "epochs")) is None
