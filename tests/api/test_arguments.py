"""What the public functions accept, and what they say about anything else."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import slipstream
from slipstream import UserError
from slipstream import config as configs
from slipstream.api.arguments import parse_overrides, prepare_job
from slipstream.base.errors import (
    Command,
    Option,
    Setting,
    parse_json_error,
    parse_json_message,
    to_json_message,
)
from tests.conftest import SMALL, small_config, waves

SOURCE = Path(slipstream.__file__).parent
COMMANDS_ONLY = {"app", "cli", "tools"}
"""Packages whose messages are shown by commands only"""
ERRORS = ("UserError", "ResumableError", "Interrupted", "ValueError")


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
    """List the texts of errors in the source, as they are before parts are added to them."""
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in COMMANDS_ONLY:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ERRORS:
                continue
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            nodes = [node for value in values for node in walk_texts(value)]
            found += [f"{path.relative_to(SOURCE)}: {node.value}" for node in nodes]
    assert len(found) > 300
    return found


def walk_texts(value: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts of an expression, but not those of the parts that word themselves."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Option", "Command", "Wording"):
        return
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value
    for child in ast.iter_child_nodes(value):
        yield from walk_texts(child)


def test_no_text_of_an_error_names_an_option_or_a_command():
    for message in list_messages():
        said = message.replace("`ray start --head`", "")  # a command of its own
        assert not re.search(r"--[a-z]", said), said
        assert not re.search(r"slipstream (train|tune|pretrain|report|copy|runs) ", said), said


def test_parts_of_messages_read_as_commands_and_as_python():
    for part, command, python in (
        (
            Command("train", resume="runs/a-1"),
            "slipstream train --resume runs/a-1",
            'slipstream.train(resume="runs/a-1")',
        ),
        (
            Command("tune", resume="runs/a", storage="URL", set="tune.trials=N"),
            "slipstream tune --resume runs/a --storage URL --set tune.trials=N",
            'slipstream.tune(resume="runs/a", storage=URL, overrides="tune.trials=N")',
        ),
        (Command("report", "runs/a"), "slipstream report runs/a", 'slipstream.report("runs/a")'),
        (
            Command("copy", "s3://b/a"),
            "slipstream copy s3://b/a",
            'slipstream.copy_run("s3://b/a")',
        ),
        (
            Command("copy", "RUN").take("s3://b/runs"),
            "slipstream copy RUN s3://b/runs",
            'slipstream.copy_run(RUN, "s3://b/runs")',
        ),
        (Command("predict"), "slipstream predict", "slipstream.predict"),
        (Option("force", True), "--force", "force=True"),
        (Option("allow-code", True), "--allow-code", "allow_code=True"),
        (Option("set", "out=FOLDER"), "--set out=FOLDER", 'overrides="out=FOLDER"'),
        (Option("workers", 2), "--workers 2", "workers=2"),
        (Option("seeds"), "--seeds", "seeds"),
        (Setting({"data.short": "drop"}), 'data.short = "drop"', 'data.short = "drop"'),
    ):
        assert (str(part), part.render("python")) == (command, python)
        sent = json.loads(json.dumps(to_json_message("use " + part + ", or not")))
        assert parse_json_message(sent) == "use " + part + ", or not"


def test_a_message_keeps_its_parts_in_an_error_of_another_process():
    error = UserError("a: is wrong", fix="pass " + Option("force", True))
    for copy in (
        pickle.loads(pickle.dumps(error)),
        parse_json_error(UserError, json.loads(json.dumps(error.to_json()))),
    ):
        assert str(copy) == "a: is wrong; pass --force"
        copy.reader = "python"
        assert str(copy) == "a: is wrong; pass force=True"


def test_fields_are_worded_in_one_way():
    error = UserError(
        setting="data.context", file="job.toml", line=3, found="0", accepted="at least 1"
    )
    assert str(error) == "job.toml, line 3: data.context is 0; it should be at least 1"
    error = UserError("holds no runs", file="runs", fix="train one: " + Command("train"))
    assert str(error) == "runs: holds no runs; train one: slipstream train"


def test_an_error_from_python_names_the_function(tmp_path):
    config = small_config(tmp_path)
    run = slipstream.train(config, waves(), overrides="train.epochs=1", quiet=True).run
    with pytest.raises(UserError, match=r"resume with: slipstream\.train\(resume="):
        slipstream.tune(resume=run, quiet=True)


def test_an_error_from_python_names_the_argument(tmp_path):
    with pytest.raises(UserError, match='overrides: "epochs" is not'):
        slipstream.train(small_config(tmp_path), waves(), overrides="epochs", quiet=True)
