from __future__ import annotations

import json
import math

import pytest

from slipstream import UserError, runs


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    first, second = (runs.create_run("a", out=str(tmp_path)) for _ in range(2))
    assert first.folder != second.folder
    assert first.folder.is_dir()


def test_an_output_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="out = "):
        runs.create_run("a", out=str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="out = "):
        runs.create_run("a", out=str(tmp_path / "file"))


def test_events_read_back_in_order_and_are_watched(tmp_path):
    seen = []
    run = runs.create_run("a", out=str(tmp_path), watch=seen.append)
    run.append("log", loss=0.5)
    run.append("end", loss=math.nan)
    found = list(runs.read_events(run))
    assert [event["event"] for event in found] == ["log", "end"]
    assert found[1]["loss"] is None
    assert [event["event"] for event in seen] == ["log", "end"]


def test_json_has_no_nan():
    text = runs.to_json({"a": math.nan, "b": [math.inf, 1.5], 3: (1, 2)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "3": [1, 2]}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    runs.write_json(path, {"a": 1})

    def fail_half_way():
        with runs.replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert runs.read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such run folder"):
        runs.open_run(tmp_path / "none")
    with pytest.raises(UserError, match="is not a run folder"):
        runs.open_run(tmp_path)
