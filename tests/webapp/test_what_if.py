"""What-if over HTTP: bases, tries as jobs, the history, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import quote

import pytest

from slipstream import config as configs
from slipstream.app.jobs import JobStore
from slipstream.app.screens import what_if
from tests.webapp.conftest import Site, write_run

SMALL = {"data.stride": "40", "model.hidden": "8", "data.context": "20", "train.epochs": "1"}


def open_demo(site: Site, **changes: str) -> str:
    """Open a small version of the demo."""
    demo = configs.load_demo()
    from slipstream.app import forms

    form = forms.fill(demo) | {"data.path": demo.data.paths[0]} | SMALL | changes
    answer = site.post("/api/what-if", {"settings": form})
    assert answer.status == 200, answer.text
    return str(answer.json["session"])


def read_page(site: Site, session: str) -> dict:
    page = site.get(f"/what-if?session={quote(session)}")
    assert page.status == 200, page.text
    return json.loads(re.search(r'id="values">(.*?)</script>', page.text, re.DOTALL)[1])


def try_values(site: Site, session: str, **changes: float) -> dict:
    values = read_page(site, session)["base"] | {
        k.replace("__", "."): v for k, v in changes.items()
    }
    answer = site.post(f"/api/what-if/{session}/try", {"values": values})
    return answer.json | {"status": answer.status}


def run_job(site: Site, job: str) -> None:
    """Run what waits as a worker does, in a process of its own that then ends."""
    command = [sys.executable, "-m", "slipstream", "ui-worker", str(site.workspace.folder), "cpu"]
    store = JobStore(site.workspace.folder)
    while store.read(job).state in ("queued", "running"):
        subprocess.run(command, check=False)
    assert store.read(job).state == "finished", store.read(job).error


@pytest.fixture
def still(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A server that starts no workers by itself."""
    monkeypatch.setattr(site.workspace.supervisor, "start_workers", lambda: None)
    return site


def test_the_same_settings_have_the_same_history(still):
    first, other = open_demo(still), open_demo(still, **{"model.hidden": "9"})
    assert first == open_demo(still) != other
    base = tomllib.loads((still.workspace.folder / "what-if" / first / "base.toml").read_text())
    assert base["model"]["hidden"] == 8
    page = still.get("/what-if")
    assert first in page.text
    assert other in page.text


def test_a_base_comes_from_a_run_a_config_or_the_demo(still):
    folder = still.workspace.folder
    (folder / "a.csv").write_text("x,y\n1,2\n")
    (folder / "a.toml").write_text('name = "a"\n[data]\npath = "a.csv"\ntargets = ["y"]\n')
    run = write_run(folder, "one")
    text = (run / "config.toml").read_text().replace('"a.csv"', f'"{folder}/a.csv"')
    (run / "config.toml").write_text(text)
    for start in ("demo", "file:a.toml", "run:one"):
        answer = still.post("/api/what-if", {"start": start})
        assert answer.status == 200, answer.text
        values = read_page(still, answer.json["session"])
        assert values["base"]["train.epochs"] == what_if.FEW_EPOCHS
    for start in ("", "run:none", "file:../x.toml", "preset:1-lstm"):
        assert still.post("/api/what-if", {"start": start}).status in (400, 404)


def test_sliders_hold_the_base_and_contexts_fit_the_patch(still):
    values = read_page(still, open_demo(still, **{"train.lr": "0.0042", "model.patch": "5"}))
    stops = {one["setting"]: one["stops"] for one in values["sliders"]}
    assert 0.0042 in stops["train.lr"]
    assert all(one % 5 == 0 for one in stops["data.context"])
    assert 20 in stops["data.context"]
    assert all(list(one) == sorted(one) for one in stops.values())


def test_widths_for_each_layer_have_no_slider(still):
    session = open_demo(still, **{"model.hidden": "[8, 4]", "model.layers": ""})
    names = [one["setting"] for one in read_page(still, session)["sliders"]]
    assert "model.hidden" not in names
    assert "train.lr" in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__lr": -1.0}, "train.lr"),
        ({"data__context": 7}, "data.context"),
        ({"model__kind": "os:system"}, "model.kind"),
        ({"model__hidden": "8]\n[x"}, "model.hidden"),
        ({"engine__device": 1}, "engine.device"),
        ({"train__epochs": None}, "train.epochs"),
    ],
)
def test_values_that_cannot_be_tried_are_refused(still, changes, message):
    session = open_demo(still)
    answer = try_values(still, session, **changes)
    assert answer["status"] == 400
    assert message in answer["error"]
    assert not still.workspace.store.list_queue("cpu")


def test_the_next_try_takes_the_place_of_the_last(still):
    session = open_demo(still)
    jobs = [try_values(still, session, model__hidden=width)["job"] for width in (4, 12)]
    store = still.workspace.store
    assert [store.read(job).state for job in jobs] == ["cancelled", "queued"]
    current = still.get(f"/api/what-if/{session}").json["current"]
    assert (current["id"], current["values"]["model.hidden"]) == (jobs[1], 12)
    other = open_demo(still, **{"model.hidden": "9"})
    try_values(still, other)
    assert store.read(jobs[1]).state == "queued"  # of another history
    assert still.post(f"/api/what-if/{session}/stop", {}).status == 200
    assert store.read(jobs[1]).state == "cancelled"


def test_what_is_left_of_a_stopped_try_is_removed_and_nothing_else(still):
    session = open_demo(still)
    job = try_values(still, session)["job"]
    place = still.workspace.folder / "what-if" / session
    stopped, foreign = (write_run(place, name, finished=False) for name in ("a", "b"))
    store = still.workspace.store
    store.take_next("cpu")
    store.record_run(job, str(stopped.relative_to(still.workspace.folder)))
    store.record_end(job, 143)
    what_if.remove_stopped(still.workspace, session)
    assert not stopped.exists()
    assert foreign.exists()


@pytest.mark.parametrize("name", ["..", "nothing", ".hidden", "%2e%2e%2fx", "<script>", "x" * 5000])
def test_no_other_folder_is_a_session(still, name):
    open_demo(still)
    for method, path in (("GET", ""), ("POST", "/stop"), ("POST", "/try"), ("POST", "/config")):
        body = None if method == "GET" else b'{"values": {}}'
        answer = still.send(
            method,
            f"/api/what-if/{quote(name, safe='%')}{path}",
            body,
            content_type="application/json",
        )
        assert answer.status == 404, answer.text
    assert still.get(f"/what-if?session={quote(name)}").status == 404


def test_text_from_a_base_is_escaped(still):
    name = "<script>alert(1)</script>\n" + "x" * 10_000
    path = still.workspace.folder / "what-if" / "odd"
    path.mkdir(parents=True)
    data = json.dumps({"path": "simulated:cell", "targets": [name]})[1:-1]
    pairs = ", ".join(re.sub(r'^"(\w+)": ', r"\1 = ", one) for one in data.split(", ", 1))
    (path / "base.toml").write_text(f"data = {{ {pairs} }}\n")
    page = still.get("/what-if?session=odd")
    assert page.status == 200
    assert "<script>alert" not in page.text


@pytest.mark.slow
def test_a_try_is_a_run_whose_command_gives_the_same_figures(still):
    session = open_demo(still)
    answer = try_values(still, session, model__hidden=12, train__lr=0.01)
    run_job(still, answer["job"])
    other = try_values(still, session, model__dropout=0.4)
    run_job(still, other["job"])
    history = still.get(f"/api/what-if/{session}").json["tries"]
    assert [one["values"]["model.hidden"] for one in history] == [12, 8]
    assert sum(bool(one.get("is_best")) for one in history) == 1
    best = min(history, key=lambda one: one["val"])
    assert best["is_best"]
    assert best["baseline_error"] > 0
    # the same settings again are not trained again
    again = try_values(still, session, model__hidden=12, train__lr=0.01)
    assert again["run"] == history[0]["run"]
    # the command that is shown, in the folder of the app
    folder = still.workspace.folder
    command = shlex.split(history[0]["command"])[1:]
    command[command.index("--out") + 1] = "alone"
    run = [sys.executable, "-m", "slipstream", *command, "--json"]
    source = str(Path(configs.__file__).parents[2])
    output = subprocess.run(
        run, cwd=folder, check=True, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": source}
    ).stdout
    alone = json.loads(output)
    tried = json.loads((folder / history[0]["run"] / "metrics.json").read_text())
    assert tried["metrics"] == alone["metrics"]
    # a run of its own, without the limits of a try
    start = still.post(f"/api/what-if/{session}/config", {"values": history[0]["values"]}).json
    config = configs.load(folder / start["start"].removeprefix("file:"))
    assert (config.model.hidden, config.train.lr, config.train.minutes) == (12, 0.01, None)
    assert still.get(f"/new?start={quote(start['start'])}").status == 200
