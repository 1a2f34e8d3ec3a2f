"""Odd words on the command line and odd files: exit code 2, one message, nothing written."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.cli.test_cli import invoke, sets
from tests.conftest import waves

LONG = "x" * 10_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A job, its table, and files and folders that are not what they seem."""
    folder = tmp_path_factory.mktemp("odd")
    waves(200).to_pandas().to_csv(folder / "table.csv", index=False)
    job = f'out = "{folder}/runs"\n[data]\npath = "table.csv"\n'
    (folder / "job.toml").write_text(job)
    (folder / "bom.toml").write_bytes(b"\xef\xbb\xbf" + job.encode())
    (folder / "utf16.toml").write_text(job, encoding="utf-16")
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    (folder / "digits.toml").write_text("seed = " + "9" * 6000)
    (folder / "folder" / "inside").mkdir(parents=True)
    (folder / "folder.csv" / "precious").mkdir(parents=True)
    for name, content in {"empty": "", "list": "[[data]]\n", "folder": None}.items():
        run = folder / f"run-{name}"
        run.mkdir()
        if content is None:
            (run / "config.toml").mkdir()
        else:
            (run / "config.toml").write_text(content)
    (folder / "loop").symlink_to(folder / "loop")
    return folder


@pytest.fixture(scope="module")
def run(place):
    found = invoke("train", place / "bom.toml", "--json", *sets())
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)["run"]


def listed(place):
    return sorted(path for path in place.rglob("*") if "lock" not in path.name)


def refused(place, *words):
    before = listed(place)
    found = invoke(*words)
    assert found.exit_code == 2, found.output
    assert "Traceback" not in found.output
    assert "fault" not in found.output
    assert listed(place) == before
    return found.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("folder", "is a folder; name a config file"),
        ("binary.toml", "is not UTF-8 text"),
        ("utf16.toml", "is not UTF-8 text"),
        ("deep.toml", "cannot be read as TOML"),
        ("digits.toml", "cannot be read as TOML"),
        ("missing.toml", "there is no such config file"),
        ("loop", "cannot be read"),
        ("job.toml/x", "cannot be read (Not a directory)"),
        (LONG, "File name too long"),
    ],
)
def test_a_config_that_is_none(place, name, told):
    assert told in refused(place, "train", place / name)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.lr", '--set: "train.lr" is not of the form section.key=value'),
        ("=", '--set: "=" is not of the form section.key=value'),
        ("data.path.x=1", '"path" is a setting, not a section'),
        ("seed=" + "9" * 6000, "... (6,002 characters); it should be"),
        (f"name={LONG}", "File name too long"),
        ("out=", "out is empty"),
        ('out="a\\u0000b"', "out is empty or contains a NUL"),
        (f"out={LONG}", "File name too long"),
        (f"data.path={LONG}", "File name too long"),
        (f"train.init_from={LONG}", "there is no such run"),
        ('train.init_from="a\\u0000b"', "there is no such run"),
        ("engine.device=x", 'it should be "auto", "cpu"'),
    ],
)
def test_a_setting_that_is_none(place, setting, told):
    assert told in refused(place, "train", place / "job.toml", *sets(setting))


@pytest.mark.parametrize("name", ["run-empty", "run-list", "run-folder", "table.csv", "loop", LONG])
@pytest.mark.parametrize(
    "words", [("evaluate",), ("report",), ("train", "--resume"), ("tune", "--resume")]
)
def test_a_run_that_is_none(place, name, words):
    refused(place, *words, place / name)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("report", "RUN", "--out", ""), "is empty; name a file or a folder"),
        (("report", "RUN", "--out", "PLACE/table.csv"), "--out FOLDER"),
        (("report", ""), "is empty; name a file or a folder"),
        (("predict", "RUN", ""), "is empty; name a file or a folder"),
        (("predict", "RUN", LONG), "File name too long"),
        (("predict", "RUN", "PLACE/table.csv", "--out", "PLACE/folder.csv"), "is a folder; name a"),
        (("predict", "RUN", "PLACE/table.csv", "--out", "PLACE/no/x.csv"), "there is no folder"),
        (("evaluate", "RUN", "--data", "PLACE/folder"), "folder: contains no .csv"),
        (("tune", "--resume", "RUN"), "is a training run, not a search; resume with: slipstream"),
        (("bench", "compare", "RUN", "RUN"), "results.json: is missing"),
        (("bench", "compare", "RUN", "RUN", "--out", "PLACE/table.csv"), "is a file; name a"),
        (("bench", "parity", "PLACE/job.toml", "--margin", "nan"), "--margin is nan"),
        (("pretrain", "--encoder", "PLACE/run-empty", "--probe", "PLACE/job.toml"), "metrics.json"),
    ],
)
def test_words_that_do_not_fit(place, run, words, told):
    words = [word.replace("PLACE", str(place)).replace("RUN", run) for word in words]
    assert told in refused(place, *words)


def test_a_name_that_is_not_utf_8(place, run):
    name = os.fsdecode(os.fsencode(place) + b"/caf\xe9.csv")
    shutil.copy(place / "table.csv", name)
    assert "caf\\udce9.csv: is not valid UTF-8; rename" in refused(place, "predict", run, name)


def test_a_search_is_not_trained_on(place):
    more = ("tune.trials=1", "tune.retrain=0", 'tune.space={"train.lr"=[0.1, 0.2]}')
    found = invoke("tune", place / "job.toml", "--json", *sets(f"out={place}/searches", *more))
    assert found.exit_code == 0, found.output
    run = json.loads(found.stdout)["run"]
    assert "is a search; resume with: slipstream tune" in refused(place, "train", "--resume", run)
