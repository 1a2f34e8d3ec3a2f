"""What-if over HTTP: bases, tries as jobs, the history, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from slipstream import config as configs
from slipstream.app.jobs import JobStore
from slipstream.app.screens import what_if
from slipstream.data import defaults
from tests.app.conftest import Site, start_site, write_run

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
def working(tmp_path: Path) -> Iterator[Site]:
    """A server that starts workers for its jobs."""
    site, stop = start_site(tmp_path, starts_workers=True)
    yield site
    stop()


def test_the_same_settings_have_the_same_history(site):
    first, other = open_demo(site), open_demo(site, **{"model.hidden": "9"})
    assert first == open_demo(site) != other
    base = tomllib.loads((site.workspace.folder / "what-if" / first / "base.toml").read_text())
    assert base["model"]["hidden"] == 8
    page = site.get("/what-if")
    assert first in page.text
    assert other in page.text


def test_a_base_comes_from_a_run_a_config_or_the_demo(site):
    folder = site.workspace.folder
    (folder / "a.csv").write_text("x,y\n1,2\n")
    (folder / "a.toml").write_text('name = "a"\n[data]\npath = "a.csv"\ntargets = ["y"]\n')
    run = write_run(folder, "one")
    text = (run / "config.toml").read_text().replace('"a.csv"', f'"{folder}/a.csv"')
    (run / "config.toml").write_text(text)
    for start in ("demo", "file:a.toml", "run:one"):
        answer = site.post("/api/what-if", {"start": start})
        assert answer.status == 200, answer.text
        values = read_page(site, answer.json["session"])
        assert values["base"]["train.epochs"] == what_if.FEW_EPOCHS
    for start in ("", "run:none", "file:../x.toml", "preset:1-lstm"):
        assert site.post("/api/what-if", {"start": start}).status in (400, 404)


def test_sliders_hold_the_base_and_contexts_fit_the_patch(site):
    values = read_page(site, open_demo(site, **{"train.lr": "0.0042", "model.patch": "5"}))
    stops = {one["setting"]: one["stops"] for one in values["sliders"]}
    assert 0.0042 in stops["train.lr"]
    assert all(one % 5 == 0 for one in stops["data.context"])
    assert 20 in stops["data.context"]
    assert all(list(one) == sorted(one) for one in stops.values())


def test_sliders_show_what_the_data_decide(site):
    """Settings that are left out are numbers that the data decide: those are on the sliders, and
    a slider that is moved to another number is another try."""
    folder = site.workspace.folder
    rows = [f"2024-01-{1 + n // 24:02} {n % 24:02}:00,{n % 24 + n % 7}" for n in range(20 * 24)]
    (folder / "load.csv").write_text("\n".join(["time,load", *rows, ""]))
    (folder / "load.toml").write_text(
        '[data]\npath = "load.csv"\ntime = "time"\ntargets = ["load"]\nhorizon = 24\n'
    )
    answer = site.post("/api/what-if", {"start": "file:load.toml"})
    session = answer.json["session"]
    base = configs.load(folder / "what-if" / session / "base.toml")
    resolved = defaults.resolve(configs.load(folder / "load.toml"), measures=False).config
    values = read_page(site, session)["base"]
    for name in ("data.context", "train.lr", "train.batch"):
        assert values[name] == what_if.read_setting(base, name)
        assert values[name] == what_if.read_setting(resolved, name)
    assert values["train.batch"] != configs.Config().train.batch


def test_widths_for_each_layer_have_no_slider(site):
    session = open_demo(site, **{"model.hidden": "[8, 4]", "model.layers": ""})
    names = [one["setting"] for one in read_page(site, session)["sliders"]]
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
def test_values_that_cannot_be_tried_are_refused(site, changes, message):
    session = open_demo(site)
    answer = try_values(site, session, **changes)
    assert answer["status"] == 400
    assert message in answer["error"]
    assert not site.workspace.store.list_queue("cpu")


def test_the_next_try_takes_the_place_of_the_last(site):
    session = open_demo(site)
    jobs = [try_values(site, session, model__hidden=width)["job"] for width in (4, 12)]
    store = site.workspace.store
    assert [store.read(job).state for job in jobs] == ["cancelled", "queued"]
    current = site.get(f"/api/what-if/{session}").json["current"]
    assert (current["id"], current["values"]["model.hidden"]) == (jobs[1], 12)
    other = open_demo(site, **{"model.hidden": "9"})
    try_values(site, other)
    assert store.read(jobs[1]).state == "queued"  # of another history
    assert site.post(f"/api/what-if/{session}/stop", {}).status == 200
    assert store.read(jobs[1]).state == "cancelled"


def test_what_is_left_of_a_stopped_try_is_removed_and_nothing_else(site):
    session = open_demo(site)
    job = try_values(site, session)["job"]
    place = site.workspace.folder / "what-if" / session
    stopped, foreign = (write_run(place, name, finished=False) for name in ("a", "b"))
    store = site.workspace.store
    store.take_next("cpu")
    store.record_run(job, str(stopped.relative_to(site.workspace.folder)))
    store.record_end(job, 143)
    what_if.remove_stopped(site.workspace, session)
    assert not stopped.exists()
    assert foreign.exists()


@pytest.mark.parametrize("name", ["..", "nothing", ".hidden", "%2e%2e%2fx", "<script>", "x" * 5000])
def test_no_other_folder_is_a_session(site, name):
    open_demo(site)
    for method, path in (("GET", ""), ("POST", "/stop"), ("POST", "/try"), ("POST", "/config")):
        body = None if method == "GET" else b'{"values": {}}'
        answer = site.send(
            method,
            f"/api/what-if/{quote(name, safe='%')}{path}",
            body,
            content_type="application/json",
        )
        assert answer.status == 404, answer.text
    assert site.get(f"/what-if?session={quote(name)}").status == 404


def test_text_from_a_base_is_escaped(site):
    name = "<script>alert(1)</script>\n" + "x" * 10_000
    path = site.workspace.folder / "what-if" / "odd"
    path.mkdir(parents=True)
    data = json.dumps({"path": "simulated:cell", "targets": [name]})[1:-1]
    pairs = ", ".join(re.sub(r'^"(\w+)": ', r"\1 = ", one) for one in data.split(", ", 1))
    (path / "base.toml").write_text(f"data = {{ {pairs} }}\n")
    page = site.get("/what-if?session=odd")
    assert page.status == 200
    assert "<script>alert" not in page.text


@pytest.mark.slow
def test_a_try_is_a_run_whose_command_gives_the_same_figures(working):
    session = open_demo(working)
    answer = try_values(working, session, model__hidden=12, train__lr=0.01)
    run_job(working, answer["job"])
    other = try_values(working, session, model__dropout=0.4)
    run_job(working, other["job"])
    history = working.get(f"/api/what-if/{session}").json["tries"]
    assert [one["values"]["model.hidden"] for one in history] == [12, 8]
    assert sum(bool(one.get("is_best")) for one in history) == 1
    best = min(history, key=lambda one: one["val"])
    assert best["is_best"]
    assert best["baseline_error"] > 0
    # the same settings again are not trained again
    again = try_values(working, session, model__hidden=12, train__lr=0.01)
    assert again["run"] == history[0]["run"]
    # the command that is shown, in the folder of the app
    folder = working.workspace.folder
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
    start = working.post(f"/api/what-if/{session}/config", {"values": history[0]["values"]}).json
    config = configs.load(folder / start["start"].removeprefix("file:"))
    assert (config.model.hidden, config.train.lr, config.train.minutes) == (12, 0.01, None)
    assert working.get(f"/new?start={quote(start['start'])}").status == 200
