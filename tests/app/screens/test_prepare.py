"""Prepare over HTTP: roles, steps, splits, fixes, and names that are hostile."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest

import slipstream
from slipstream import config as configs
from slipstream.app.jobs import FOLDER
from slipstream.config.prepare import STEPS
from tests.app.conftest import start_site
from tests.conftest import mostly_slow

ROWS = 400
ODD = ["<script>alert(1)</script>", '"onload="x', "ü & ' `", "[x]", " padded ", "x" * 10_000]


def write_table(path, *, columns=("time", "load", "wind"), rows=ROWS, cell=None):
    """Hours of two columns of numbers; `cell` replaces some cells."""
    lines = [",".join(columns)]
    for hour in range(rows):
        values = [
            f"2024-01-{1 + hour // 24:02d} {hour % 24:02d}:00",
            f"{math.sin(hour / 4):.4f}",
            f"{math.cos(hour / 9):.4f}",
        ]
        values += [f"{random.Random(hour).random():.4f}" for _ in columns[3:]]
        if cell is not None:
            values = [cell(hour, number, text) for number, text in enumerate(values)]
        lines.append(",".join(values))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A site with a table, for tests that change nothing in the folder."""
    folder = tmp_path_factory.mktemp("prepare")
    write_table(folder / "load.csv")
    weather = ["time,temperature"]
    weather += [f"2024-01-{day:02d} 00:00,{day}" for day in range(1, 18)]
    (folder / "weather.csv").write_text("\n".join(weather) + "\n", encoding="utf-8")
    site, stop = start_site(folder)
    yield site
    stop()


@pytest.fixture(scope="module")
def emptied(tmp_path_factory):
    """A site for all tests, whose folder is emptied after each."""
    site, stop = start_site(tmp_path_factory.mktemp("drafts"))
    yield site
    stop()


@pytest.fixture
def site(emptied):
    yield emptied
    for path in emptied.workspace.folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name != FOLDER:
                shutil.rmtree(path)
        else:
            path.unlink()
    shutil.rmtree(emptied.workspace.folder / FOLDER / "drafts", ignore_errors=True)


def begin(site, file="load.csv", **body):
    answer = site.post("/api/prepare/draft", {"file": file} | body)
    assert answer.status == 200, answer.text
    return answer.json


def change(site, state, *changes):
    answer = site.post("/api/prepare/draft", {"draft": state["draft"], "change": list(changes)})
    assert answer.status == 200, answer.text
    return answer.json


def roles(state):
    return {column["name"]: column["role"] for column in state["columns"]}


def test_the_draft_of_a_file_is_what_inspect_proposes(prepared):
    state = begin(prepared)
    assert roles(state) == {"time": "time", "load": "target", "wind": "input"}
    assert state["ready"]
    assert 'path = "load.csv"' in state["toml"]
    assert state["command"].startswith("slipstream train load.toml --out ")
    config = configs.load({}, ["data.path=load.csv"])
    assert config.data.context == 96


STEP_FIELDS = {
    "resample": {"every": "2h"},
    "filter": {"kind": "ema", "columns": '["load"]', "rows": "12"},
    "formula": {"name": "both", "value": "load * lag(wind, 1)"},
    "calendar": {"features": '["hour"]', "holidays": '["2024-01-02"]'},
    "join": {"path": "weather.csv", "period": "1d"},
    "label": {"column": "load", "rows": "3", "up": "0.2", "relative": "false"},
    "unit": {"columns": '["load"]', "factor": "10", "unit": "kW"},
    "pad": {"rows": "20"},
    "clip": {"columns": '["load"]', "low": "-0.5", "high": "0.5"},
    "outliers": {"columns": '["load"]', "method": "quantile", "low": "0.1", "high": "0.9"},
}


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_previewed_before_and_after(prepared, step):
    state = begin(prepared)
    state = change(prepared, state, {"add": {"step": step} | STEP_FIELDS[step]})
    if step == "label":
        (problem,) = (one for one in state["problems"] if one["kind"] == "error")
        state = change(prepared, state, *problem["fixes"][0]["change"])
    assert state["wrong"] == {}, state["wrong"]
    body = {"draft": state["draft"], "number": 1, "begin": 0, "count": 200}
    answer = prepared.post("/api/prepare/preview", body).json
    assert "error" not in answer, answer
    assert answer["range"] == [0, 200]
    before, after = answer["before"], answer["after"]
    assert len(after["x"]) == len(after["y"])
    expected = {
        "resample": lambda: after["num_rows"] == 100,
        "filter": lambda: max(after["y"]) < max(before["y"]),
        "formula": lambda: answer["column"] == "both" and before is None,
        "calendar": lambda: answer["column"] == "hour_sin" and max(after["y"]) == 1.0,
        "join": lambda: answer["column"] == "temperature" and after["y"][0] == 1.0,
        "label": lambda: after["classes"] == ["down", "flat", "up"],
        "unit": lambda: max(after["y"]) == pytest.approx(10 * max(before["y"])),
        "pad": lambda: after["num_rows"] == 220 and after["x"][0] < before["x"][0],
        "clip": lambda: max(after["y"]) == 0.5 and max(before["y"]) > 0.9,
        "outliers": lambda: max(after["y"]) < max(before["y"]) and "fitted" in answer["notes"][-1],
    }
    assert expected[step]()


def test_a_step_that_is_wrong_is_marked_with_the_message_of_the_command_line(prepared):
    state = change(prepared, begin(prepared), {"add": {"step": "clip", "columns": '["load"]'}})
    state = change(prepared, state, {"add": {"step": "filter", "kind": "ema", "rows": "many"}})
    assert state["step"] == 1
    assert "low and high are both missing" in state["wrong"]["data.prepare"]
    state["draft"]["steps"][0]["low"] = "0"
    state = change(prepared, state)
    assert state["step"] == 2
    assert not state["ready"]
    assert "columns" in state["wrong"]["data.prepare"]
    state = change(prepared, state, {"remove": 1}, {"add": {"step": "formula", "name": "x"}})
    state["draft"]["steps"][1]["value"] = "lod + 1"
    state = change(prepared, state)
    assert state["step"] == 2
    assert '"load"' in state["wrong"]["data.prepare"]


def test_steps_are_moved_and_removed(prepared):
    state = change(
        prepared,
        begin(prepared),
        {"add": {"step": "pad"}},
        {"add": {"step": "clip", "columns": '["load"]', "low": "0"}},
        {"add": {"step": "resample", "every": "3600"}, "at": 0},
    )
    assert [step["step"] for step in state["draft"]["steps"]] == ["resample", "pad", "clip"]
    state = change(prepared, state, {"move": [2, 1]}, {"remove": 0})
    assert [step["step"] for step in state["draft"]["steps"]] == ["clip", "pad"]
    assert "every" not in state["toml"]
    for wrong in ({"move": [0, 5]}, {"remove": 9}, {"turn": 1}, {"add": {"step": "explode"}}):
        body = {"draft": state["draft"], "change": [wrong]}
        assert prepared.post("/api/prepare/draft", body).status == 400


def test_roles_are_written_as_the_settings_that_list_them(prepared):
    state = change(prepared, begin(prepared), {"role": ["wind", "future"]})
    assert roles(state)["wind"] == "future"
    assert state["draft"]["settings"]["data.future"] == '["wind"]'
    state = change(prepared, state, {"role": ["wind", "static"]}, {"role": ["load", "output"]})
    assert "data.future" not in state["draft"]["settings"]
    assert state["draft"]["settings"]["data.inputs"] == "[]"
    assert "data.inputs is empty" in "".join(state["wrong"].values())
    state = change(prepared, state, {"role": ["wind", "input"]}, {"role": ["load", "target"]})
    assert state["draft"]["settings"]["data.inputs"] == '["load", "wind"]'
    assert state["ready"]
    state = change(prepared, state, {"role": ["wind", "id"]}, {"role": ["wind", "time"]})
    assert state["draft"]["settings"]["data.time"] == "wind"
    assert roles(state)["time"] == "ignore"
    body = {"draft": state["draft"], "change": [{"role": ["wind", "king"]}]}
    assert prepared.post("/api/prepare/draft", body).status == 400


def test_a_column_of_a_step_has_a_role_and_is_said_to_be_unused_until_then(prepared):
    step = {"step": "formula", "name": "both", "value": "load + wind"}
    state = change(prepared, begin(prepared), {"add": step})
    assert roles(state)["both"] == "ignore"
    (problem,) = (one for one in state["problems"] if one["kind"] == "unused")
    state = change(prepared, state, *problem["fixes"][0]["change"])
    assert roles(state)["both"] == "input"
    assert not any(one["kind"] == "unused" for one in state["problems"])


SPLITS = {
    "shares": {"train": "0.5", "val": "0.25", "test": "0.25"},
    "rows": {"rows": "[200, 100, 100]"},
    "walk": {"walk_forward": "3"},
    "rolling": {"walk_forward": "2", "window": "rolling", "purge": "2"},
    "by": {"by": "kind", "val": '["b"]', "test": '["c"]'},
    "stratified": {"train": "0.6", "val": "0.2", "test": "0.2", "stratified": "true"},
}


def set_split(values):
    cleared = dict.fromkeys(("train", "val", "test", "rows"), "")
    return {"set": {f"data.split.{name}": text for name, text in (cleared | values).items()}}


@pytest.mark.parametrize("kind", mostly_slow(SPLITS, "by", "walk"))
def test_every_kind_of_split_is_counted_as_training_does(site, kind):
    folder = site.workspace.folder
    write_table(
        folder / "load.csv",
        columns=("time", "load", "wind", "kind"),
        cell=lambda hour, number, text: "abc"[hour * 3 // ROWS] if number == 3 else text,
    )
    small = {"set": {"data.context": "4", "data.horizon": "2"}}
    state = change(site, begin(site), small, set_split(SPLITS[kind]))
    if kind == "stratified":
        text = {"data.task": "classify", "data.horizon": "0", "data.targets": '["regime"]'}
        write_table(
            folder / "load.csv",
            columns=("time", "load", "wind", "regime"),
            cell=lambda hour, number, text: "ab"[hour // 50 % 2] if number == 3 else text,
        )
        state = change(site, begin(site), {"set": text | {"data.context": "4"}})
        state = change(site, state, {"set": {"data.inputs": '["load"]'}}, set_split(SPLITS[kind]))
    assert state["ready"], state["wrong"]
    answer = site.post("/api/prepare/split", {"draft": state["draft"]}).json
    assert "error" not in answer, answer
    assert answer["rows"] == ROWS
    from slipstream.data.dataset import load_dataset

    path = folder / "job.toml"
    path.write_text(state["toml"], encoding="utf-8")
    dataset = load_dataset(configs.load(path))
    expected = [fold.num_windows for fold in dataset.folds] or [dataset.num_windows]
    assert [fold["windows"] for fold in answer["folds"]] == expected
    first = answer["folds"][0]["spans"]
    assert [first[0][2], first[-1][2]][0] == "train"
    assert {span[2] for span in first} == {"train", "val", "test"}
    if kind == "shares":
        assert answer["folds"][0]["rows"] == {"train": 200, "val": 100, "test": 100}
        assert first[0][0] == answer["plot"]["x"][0]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_the_prepared_rows_are_downloaded_as_the_command_writes_them(prepared, tmp_path, ending):
    step = {"step": "formula"} | STEP_FIELDS["formula"]
    state = change(prepared, begin(prepared), {"add": step})
    answer = prepared.post("/api/prepare/rows", {"draft": state["draft"], "ending": ending})
    assert answer.status == 200, answer.text
    name = f'attachment; filename="load-rows{ending}"'
    assert answer.headers["content-disposition"] == name
    job = prepared.workspace.folder / "rows-job.toml"
    job.write_text(state["toml"])
    wanted = tmp_path / f"rows{ending}"
    slipstream.prepare(job, out=wanted)
    job.unlink()
    assert answer.body == wanted.read_bytes()


def test_rows_that_cannot_be_prepared_are_an_error(prepared):
    state = begin(prepared)
    draft = state["draft"] | {"settings": state["draft"]["settings"] | {"data.context": "9999"}}
    answer = prepared.post("/api/prepare/rows", {"draft": draft})
    assert answer.status == 400
    assert "data.context is 9999" in answer.json["error"]
    answer = prepared.post("/api/prepare/rows", {"draft": state["draft"], "ending": ".exe"})
    assert answer.status == 400
    assert "expected one of .csv" in answer.json["error"]


def test_folders_are_a_split(site):
    folder = site.workspace.folder / "cells"
    for name in ("train", "val", "test"):
        (folder / name).mkdir(parents=True)
        write_table(folder / name / "a.csv", rows=150)
    state = begin(site, "cells")
    assert state["draft"]["settings"]["data.split.folders"] == "true"
    answer = site.post("/api/prepare/split", {"draft": state["draft"]}).json
    assert answer["folds"][0]["rows"] == {"train": 150, "val": 150, "test": 150}
    assert answer["num_series"] == 3


def test_dates_become_counts_of_rows(prepared):
    state = begin(prepared)
    borders = ["2024-01-10", "2024-01-13 00:00", ""]
    body = {"draft": state["draft"], "borders": borders}
    assert prepared.post("/api/prepare/dates", body).json == {"rows": [216, 72, 112]}
    for wrong in (["tomorrow", "2024-01-13", ""], ["2024-01-13", "2024-01-10", ""], ["", "", ""]):
        answer = prepared.post("/api/prepare/dates", body | {"borders": wrong}).json
        assert answer["error"]


def test_values_of_a_column_are_listed_for_the_split(prepared):
    state = begin(prepared, "weather.csv")
    body = {"draft": state["draft"], "column": "temperature"}
    values = prepared.post("/api/prepare/groups", body).json["values"]
    assert values[:3] == ["1", "2", "3"]
    body["column"] = "series"
    assert prepared.post("/api/prepare/groups", body).json["values"] == ["weather.csv"]


def gap(hour, number, text):
    return f"2024-02-{1 + hour // 24:02d} {hour % 24:02d}:00" if number == 0 and hour > 99 else text


def repeated(hour, number, text):
    return "2024-01-01 10:00" if number == 0 and hour == 11 else text


def unreadable(hour, number, text):
    return "no time" if number == 0 and hour == 300 else text


def disorder(hour, number, text):
    late = {10: 11, 11: 10}.get(hour, hour)
    return f"2024-01-{1 + late // 24:02d} {late % 24:02d}:00" if number == 0 else text


PROBLEMS = {
    "missing": lambda hour, number, text: "" if number == 2 and hour % 50 == 7 else text,
    "infinite": lambda hour, number, text: "-inf" if number == 2 and hour % 50 == 7 else text,
    "code": lambda hour, number, text: "-999" if number == 2 and hour % 20 == 7 else text,
    "no numbers": lambda hour, number, text: "bad" if number == 2 and hour % 50 == 7 else text,
    "constant": lambda _, number, text: "5" if number == 2 else text,
    "counter": lambda hour, number, text: str(hour) if number == 2 else text,
    "copy": lambda hour, number, text: f"{math.sin(hour / 4):.4f}" if number == 2 else text,
    "text": lambda hour, number, text: "abc"[hour % 3] if number == 2 else text,
    "empty": lambda _, number, text: "" if number == 2 else text,
    "gaps": gap,
    "disorder": disorder,
    "repeated": repeated,
    "unreadable": unreadable,
}


@pytest.mark.parametrize("kind", mostly_slow(PROBLEMS, "gaps", "unreadable", "text"))
def test_each_fix_makes_its_problem_go_away(site, kind):
    write_table(site.workspace.folder / "load.csv", cell=PROBLEMS[kind])
    state = change(site, begin(site), {"set": {"data.context": "8", "data.horizon": "2"}})
    if kind != "gaps":  # the proposal has an answer to the others
        texts = {"data.inputs": '["load", "wind"]', "data.na": "", "data.missing": ""}
        texts["data.unsorted"] = texts["data.duplicates"] = ""
        if kind in ("repeated", "unreadable"):
            texts["data.time"] = "time"
        state = change(site, state, {"set": texts})
    (problem,) = (one for one in state["problems"] if one["kind"] == kind)
    assert problem["answer"] == ""
    assert problem["fixes"], problem
    for fix in problem["fixes"]:
        fixed = change(site, state, *fix["change"])
        (after,) = (one for one in fixed["problems"] if one["kind"] == kind)
        assert after["answer"], fix
        assert after["fixes"] == []
        assert fixed["wrong"] == {}
        split = site.post("/api/prepare/split", {"draft": fixed["draft"]}).json
        named = [one["title"] for one in split.get("fixes", ())]
        assert "error" not in split, (fix, split["error"], named)


def test_a_draft_leaves_no_time_out_in_silence(site):
    write_table(site.workspace.folder / "load.csv", cell=PROBLEMS["unreadable"])
    state = begin(site)
    assert "data.time" not in state["draft"]["settings"]
    (problem,) = (one for one in state["problems"] if one["kind"] == "unreadable")
    assert (problem["column"], problem["answer"]) == ("time", "")
    assert "data.time is left out" in problem["message"]
    (fix,) = problem["fixes"]
    assert fix["title"] == "Do without the time"
    accepted = change(site, state, *fix["change"])
    (problem,) = (one for one in accepted["problems"] if one["kind"] == "unreadable")
    assert problem["answer"] == "the time is not used"


def test_days_that_run_backwards_are_sorted_and_a_time_that_is_taken_out_is_told(site):
    def reverse(hour, number, text):
        return f"{20 - hour // 24:02d}.01.2024 {hour % 24:02d}:00" if number == 0 else text

    write_table(site.workspace.folder / "load.csv", cell=reverse)
    state = begin(site)
    settings = state["draft"]["settings"]
    assert (settings["data.time"], settings["data.unsorted"]) == ("time", "sort")
    assert settings["data.time_format"] == "%d.%m.%Y %H:%M"
    (problem,) = (one for one in state["problems"] if one["kind"] == "disorder")
    assert problem["answer"] == 'data.unsorted = "sort"'
    without = change(site, state, {"set": dict.fromkeys(("data.time", "data.unsorted"), "")})
    (problem,) = (one for one in without["problems"] if one["kind"] == "disorder")
    assert (problem["answer"], problem["fixes"][0]["title"]) == ("", "Sort the rows by time")
    again = change(site, without, *problem["fixes"][0]["change"])
    assert again["draft"]["settings"] == settings


def test_a_filtered_target_is_told_and_can_be_filtered_into_another_column(site):
    write_table(site.workspace.folder / "load.csv")
    step = {"step": "filter", "kind": "ema", "columns": '["load"]', "rows": "12"}
    state = change(site, begin(site), {"set": {"data.targets": '["load"]'}}, {"add": step})
    (problem,) = (one for one in state["problems"] if one["kind"] == "target")
    assert problem["column"] == "load"
    assert "which makes it easier to predict" in problem["message"]
    (fix,) = problem["fixes"]
    fixed = change(site, state, *fix["change"])
    assert not [one for one in fixed["problems"] if one["kind"] == "target"]
    assert fixed["draft"]["steps"][0]["into"] == '["load_filtered"]'
    roles = {one["name"]: one["role"] for one in fixed["columns"]}
    assert (roles["load"], roles["load_filtered"]) == ("target", "input")
    limited = {"step": "clip", "columns": '["load"]', "high": "0.5"}
    state = change(site, fixed, {"add": limited})
    (problem,) = (one for one in state["problems"] if one["kind"] == "target")
    assert "is limited to a range" in problem["message"]


def test_an_ordered_time_that_is_not_used_is_told(site):
    write_table(site.workspace.folder / "load.csv")
    state = change(site, begin(site), {"set": {"data.time": ""}})
    (problem,) = (one for one in state["problems"] if one["kind"] == "no time")
    assert "rows are taken in the order of the file" in problem["message"]
    use, leave = problem["fixes"]
    assert change(site, state, *use["change"])["draft"]["settings"]["data.time"] == "time"
    (after,) = (
        one for one in change(site, state, *leave["change"])["problems"] if one["kind"] == "no time"
    )
    assert after["answer"] == "the time is not used"


def test_a_target_among_the_inputs_and_a_target_of_text_are_fixed(site):
    write_table(site.workspace.folder / "load.csv", cell=PROBLEMS["text"])
    state = begin(site)
    wrong = change(site, state, {"set": {"data.horizon": "0", "data.inputs": '["load"]'}})
    (problem,) = (one for one in wrong["problems"] if one["kind"] == "target")
    assert "read its own answer" in "".join(wrong["wrong"].values())
    texts = {"data.horizon": "0", "data.inputs": '["load"]', "data.targets": '["wind"]'}
    text_target = change(site, state, {"set": texts})
    (problem,) = (one for one in text_target["problems"] if one["kind"] == "target")
    fixed = change(site, text_target, *problem["fixes"][0]["change"])
    assert not any(one["kind"] == "target" for one in fixed["problems"])
    assert fixed["ready"]
    assert 'task = "classify"' in fixed["toml"]


def test_a_message_of_the_loader_has_a_button_for_the_setting_that_it_names(site):
    write_table(site.workspace.folder / "load.csv", cell=PROBLEMS["missing"])
    state = change(site, begin(site), {"set": {"data.missing": ""}})
    answer = site.post("/api/prepare/split", {"draft": state["draft"]}).json
    assert "is missing" in answer["error"]
    assert [fix["title"] for fix in answer["fixes"]] == ["Set data.missing = forward"]
    fixed = change(site, state, *answer["fixes"][0]["change"])
    assert "error" not in site.post("/api/prepare/split", {"draft": fixed["draft"]}).json


@pytest.mark.parametrize("name", mostly_slow(ODD, ODD[0], ODD[-1]))
def test_hostile_names_of_columns_and_series_stay_what_they_are(site, name):
    write_table(site.workspace.folder / "load.csv")
    path = site.workspace.folder / "load.csv"
    quoted = '"' + name.replace('"', '""') + '"'
    path.write_text(path.read_text().replace("wind", quoted, 1), encoding="utf-8")
    state = begin(site)
    read = next(one["name"] for one in state["columns"] if one["name"] not in ("time", "load"))
    assert read.strip() == name.strip()
    for role in ("target", "static", "id", "future", "ignore", "input"):
        state = change(site, state, {"role": [read, role]})
        assert roles(state)[read] == role
    assert state["ready"], state["wrong"]
    step = {"step": "clip", "columns": json.dumps([read]), "low": "0"}
    state = change(site, state, {"add": step})
    assert state["ready"], state["wrong"]
    body = {"draft": state["draft"], "number": 1, "column": read}
    assert min(site.post("/api/prepare/preview", body).json["after"]["y"]) == 0.0
    answer = site.post("/api/prepare/continue", {"draft": state["draft"]}).json
    page = site.get(answer["url"])
    assert page.status == 200
    assert "<script>alert" not in page.text


def test_a_page_of_a_hostile_file_escapes_its_name(site):
    write_table(site.workspace.folder / "<b>load.csv")
    page = site.get("/prepare?file=%3Cb%3Eload.csv&start=%3Cscript%3E")
    assert page.status == 200
    assert "<b>load" not in page.text
    assert "<script>load" not in page.text
    assert begin(site, "<b>load.csv")["ready"]


def test_hostile_names_of_files_are_refused(site):
    write_table(site.workspace.folder / "load.csv")
    draft = begin(site)["draft"]
    for name in ("", "../x", "a/b", ".hidden", "x" * 101, "pyproject", "a\nb", "ü"):
        answer = site.post("/api/prepare/save", {"draft": draft, "name": name})
        assert answer.status == 400, name
        assert list(site.workspace.folder.glob("**/*.toml")) == [], name


def test_a_saved_draft_is_a_config_file_and_is_not_replaced_unasked(site):
    folder = site.workspace.folder
    write_table(folder / "load.csv")
    state = change(site, begin(site), {"set": {"train.epochs": "7"}})
    body = {"draft": state["draft"], "name": "mine.toml"}
    assert site.post("/api/prepare/save", body).json["start"] == "file:mine.toml"
    assert configs.load(folder / "mine.toml").train.epochs == 7
    assert 'path = "load.csv"' in (folder / "mine.toml").read_text()
    (folder / "mine.toml").write_text("mine\n")
    again = site.post("/api/prepare/save", body)
    assert again.status == 409
    assert again.json["exists"]
    assert (folder / "mine.toml").read_text() == "mine\n"
    assert site.post("/api/prepare/save", body | {"replace": True}).status == 200
    started = begin(site, start="file:mine.toml")
    assert started["draft"] == state["draft"]
    assert begin(site, start="config:mine.toml")["draft"] == state["draft"]


def test_a_link_is_not_written_through_and_paths_outside_are_refused(site, tmp_path_factory):
    folder = site.workspace.folder
    outside = tmp_path_factory.mktemp("outside")
    write_table(folder / "load.csv")
    write_table(outside / "secret.csv")
    (folder / "mine.toml").symlink_to(outside / "x.toml")
    state = begin(site)
    body = {"draft": state["draft"], "name": "mine", "replace": True}
    assert site.post("/api/prepare/save", body).status == 400
    assert not (outside / "x.toml").exists()
    (folder / "link.csv").symlink_to(outside / "secret.csv")
    for name in ("link.csv", "../secret.csv", str(outside / "secret.csv"), "none.csv"):
        assert site.post("/api/prepare/draft", {"file": name}).status in (400, 404), name
    for path in (str(outside / "secret.csv"), "link.csv"):
        step = {"step": "join", "path": path, "period": "1d", "prefix": "s"}
        joined = change(site, state, {"add": step})
        assert not joined["ready"]
        assert [one["name"] for one in joined["columns"]] == ["time", "load", "wind"]
        answer = site.post("/api/prepare/preview", {"draft": joined["draft"], "number": 1}).json
        assert "is not below" in answer["error"]


def test_a_range_of_a_large_file_is_read_without_the_rest(site, monkeypatch):
    from slipstream.data.formats import csv

    monkeypatch.setattr(csv, "LARGE_BYTES", 0)
    write_table(site.workspace.folder / "load.csv")
    state = begin(site)
    body = {"draft": state["draft"], "begin": 100, "count": 50, "column": "load"}
    answer = site.post("/api/prepare/preview", body).json
    assert answer["range"] == [100, 150]
    assert answer["before"]["y"][0] == pytest.approx(math.sin(25), abs=1e-4)
    beyond = site.post("/api/prepare/preview", body | {"begin": 1000}).json
    assert "has 400 rows" in beyond["error"]
    for wrong in ({"count": 10**9}, {"begin": -1}, {"begin": "x"}, {"number": "x"}):
        assert site.post("/api/prepare/preview", body | wrong).status in (200, 400)
        assert "error" in site.post("/api/prepare/preview", body | wrong).json


def test_a_file_too_large_for_a_request_is_said_so(site, monkeypatch):
    from slipstream.app.screens import prepare_rows

    monkeypatch.setattr(prepare_rows, "MAX_BYTES", 1000)
    write_table(site.workspace.folder / "load.csv")
    state = begin(site)
    assert "MB" in site.post("/api/prepare/split", {"draft": state["draft"]}).json["error"]
    assert "error" not in site.post("/api/prepare/preview", {"draft": state["draft"]}).json


def test_a_file_without_numbers_has_no_preview_but_a_reason(site):
    (site.workspace.folder / "texts.csv").write_text("a,b\n" + "x,y\n" * 50)
    state = begin(site, "texts.csv")
    answer = site.post("/api/prepare/preview", {"draft": state["draft"]})
    assert answer.status == 200
    assert "has no column of numbers to draw" in answer.json["error"]
