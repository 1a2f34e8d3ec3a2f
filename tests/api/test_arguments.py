"""What the public functions accept, and what they say about anything else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import slipstream
from slipstream import UserError
from slipstream import config as configs
from slipstream.api.arguments import parse_overrides, prepare_job
from slipstream.api.progress import translate
from tests.conftest import SMALL, small_config, waves

SOURCE = Path(slipstream.__file__).parent
COMMANDS_ONLY = {"bench", "cli", "doctor", "profiling", "terminal", "api"}
"""Packages whose messages are shown by commands only"""


@pytest.mark.parametrize("data", [SMALL, None, "job.csv"])
def test_a_table_in_the_place_of_the_config_is_refused_with_the_order(data):
    for table in (waves(), waves().to_pandas(), {"a": [1.0, 2.0]}, np.zeros((3, 2))):
        with pytest.raises(UserError, match=r"slipstream.train\(config, data\)"):
            slipstream.train(table, data)


def test_another_type_is_refused_with_what_is_accepted():
    with pytest.raises(UserError, match="config is an int; pass a TOML file"):
        slipstream.train(3)
    with pytest.raises(UserError, match="is a dict; pass a run folder, or the result of train"):
        slipstream.evaluate({})


def test_overrides_are_a_text_several_or_a_mapping():
    assert parse_overrides("train.epochs=1") == ("train.epochs=1",)
    assert parse_overrides(["a=1", "b=2"]) == ("a=1", "b=2")
    mapping = {"train.lr": np.float32(0.5), "data.path": Path("x y.csv"), "model.hidden": [8]}
    texts = parse_overrides(mapping)
    assert texts[:2] == ("train.lr=0.5", 'data.path="x y.csv"')
    job = prepare_job("train", small_config(), None, overrides=mapping)
    loaded = configs.load(job.config, job.overrides)
    assert loaded.model.sizes == (8,)
    for wrong in (1, [1], {"train.lr": None}):
        with pytest.raises(UserError, match="overrides"):
            parse_overrides(wrong)


def test_an_override_of_one_text_is_applied(tmp_path):
    config = small_config(tmp_path)
    result = slipstream.train(config, waves(), overrides="train.epochs=1", quiet=True)
    assert result.config.train.epochs == 1


def test_paths_and_results_become_settings():
    job = prepare_job("train", None, Path("new.csv"), init_from=Path("runs/a"))
    assert job.data is None
    assert job.overrides == ('train.init_from="runs/a"', 'data.path="new.csv"')


def test_a_config_takes_paths_and_numbers_of_numpy():
    settings = {"path": Path("a.csv"), "context": np.int64(16)}
    for config in (slipstream.Config(data=settings), configs.load({"data": settings})):
        assert Path(config.data.path).name == "a.csv"
        assert config.data.context == 16
    assert slipstream.Config(out=Path("runs"), data={"path": [Path("a"), "b"]}).data.paths == (
        "a",
        "b",
    )


def test_names_of_an_arrays_columns():
    job = prepare_job("train", None, np.arange(6.0).reshape(3, 2), columns=("a", "b"))
    assert {name: list(values) for name, values in job.data.items()} == {
        "a": [0, 2, 4],
        "b": [1, 3, 5],
    }
    for columns, match in ((["a"], "1 names"), (["a", "a"], "a name twice")):
        with pytest.raises(UserError, match=match):
            prepare_job("train", None, np.zeros((3, 2)), columns=columns)
    with pytest.raises(UserError, match=r"data is a pyarrow\.lib\.Table|data is a pyarrow"):
        prepare_job("train", None, waves(), columns=["a"])


def list_messages() -> list[str]:
    """List every text of the source that names an option of the command line."""
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in COMMANDS_ONLY:
            continue
        source = path.read_text(encoding="utf-8")
        if not re.search(r"--[a-z]", source):
            continue
        calls = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("UserError", "ResumableError", "Interrupted")
        ]
        for call in calls:
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X"
                for node in call.args
                for part in (node.values if isinstance(node, ast.JoinedStr) else [node])
            )
            found += [text] if re.search(r"--[a-z]", text) else []
    assert len(found) > 10
    return found


@pytest.mark.parametrize("message", list_messages())
def test_no_message_names_an_option_of_the_command_line(message):
    said = translate(message)
    said = said.replace("`ray start --head`", "")  # a command of its own
    assert "--" not in said, said
    assert "slipstream train" not in said
    assert "slipstream tune" not in said


def test_translated_messages_read_as_python():
    message = "stopped; resume with: slipstream train --resume runs/a-1"
    assert translate(message) == 'stopped; resume with: slipstream.train(resume="runs/a-1")'
    message = "slipstream tune --resume runs/a --storage URL --set tune.trials=N"
    resumed = 'slipstream.tune(resume="runs/a", storage=URL, overrides="tune.trials=N")'
    assert translate(message) == resumed
    assert translate("see slipstream report runs/a") == 'see slipstream.report("runs/a")'
    assert translate("`slipstream runs out` lists") == 'slipstream.list_runs("out") lists'
    assert translate("slipstream copy s3://b/a") == 'slipstream.copy_run("s3://b/a")'
    message = "copy it: slipstream copy RUN s3://b/runs"
    assert translate(message) == 'copy it: slipstream.copy_run("RUN", "s3://b/runs")'
    assert translate("or pass --force") == "or pass force=True"
    message = "choose another with --set out=FOLDER"
    assert translate(message) == 'choose another with overrides="out=FOLDER"'


def test_an_error_from_python_names_the_argument(tmp_path):
    with pytest.raises(UserError, match='overrides: "epochs" is not'):
        slipstream.train(small_config(tmp_path), waves(), overrides="epochs", quiet=True)
