from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slipstream import UserError, runs
from slipstream.events import End, Log
from tests.logs import as_lines, read_lines


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
    run = runs.create_run("a", out=str(tmp_path), watch=as_lines(seen.append))
    run.append(Log(step=1, loss=0.5))
    run.append(End(seconds=math.nan))
    assert [type(event) for event in runs.read_events(run)] == [Log, End]
    found = read_lines(run)
    assert [event["event"] for event in found] == ["log", "end"]
    assert found[1]["seconds"] is None
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


def test_metrics_can_be_changed(tmp_path):
    (tmp_path / "config.toml").write_text("seed = 0\n")
    runs.write_metrics(runs.Run(tmp_path), {"seconds": 1.0, "time": {"wall_s": 1.0}})
    assert runs.update_metrics(tmp_path, time={"wall_s": 2.0})["seconds"] == 1.0
    assert runs.read_metrics(tmp_path) == {"seconds": 1.0, "time": {"wall_s": 2.0}}
    runs.verify_files(tmp_path, "config.toml", "metrics.json")


@pytest.mark.parametrize(("name", "wall_s"), [("metrics.json", 1.0), ("manifest.json", 2.0)])
def test_a_kill_while_metrics_are_changed_leaves_a_readable_run(
    tmp_path, monkeypatch, name, wall_s
):
    runs.write_metrics(runs.Run(tmp_path), {"wall_s": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", make_killer(Path.replace, name))
        with pytest.raises(KeyboardInterrupt):
            runs.update_metrics(tmp_path, wall_s=2.0)
    assert runs.read_metrics(tmp_path) == {"wall_s": wall_s}


def make_killer(replace, name):
    """Return a `Path.replace` that fails for the file of this name."""

    def kill(self, target):
        if Path(target).name == name:
            raise KeyboardInterrupt
        return replace(self, target)

    return kill
