"""Home over HTTP: removing runs, and the demo."""

from __future__ import annotations

import re

from slipstream.runs.lock import hold_lock
from tests.app.conftest import write_run


def test_runs_are_removed_with_their_files(site):
    out = site.workspace.folder / "runs"
    first, second = write_run(out, "job-1"), write_run(out, "job-2")
    answer = site.post("/api/remove", {"runs": ["runs/job-1"]})
    assert answer.json == {"removed": ["job-1"]}
    assert not first.exists()
    assert second.exists()


def test_nothing_is_removed_where_one_run_is_written_to_or_missing(site):
    out = site.workspace.folder / "runs"
    first, second = write_run(out, "job-1"), write_run(out, "job-2")
    with hold_lock(second):
        answer = site.post("/api/remove", {"runs": ["runs/job-1", "runs/job-2"]})
        assert answer.status == 400
    assert site.post("/api/remove", {"runs": ["runs/job-1", "runs/gone"]}).status == 404
    for wrong in ([], "runs/job-1", [1], None):
        assert site.post("/api/remove", {"runs": wrong}).status == 400
    assert first.exists()
    assert second.exists()


def test_a_run_is_running_while_others_train_shares_of_it(site):
    run = write_run(site.workspace.folder / "runs", "job-1", finished=False)
    share = run / "workers" / "0"
    share.mkdir(parents=True)

    def read_state():
        (row,) = site.get("/api/runs").json["runs"]
        return row["state"]

    assert read_state() == "stopped"
    with hold_lock(share):
        assert read_state() == "running"
    assert read_state() == "stopped"


def test_only_runs_below_the_folder_are_removed(site, tmp_path_factory):
    outside = write_run(tmp_path_factory.mktemp("outside"), "job-1")
    (site.workspace.folder / "data").mkdir()
    (site.workspace.folder / "link").symlink_to(outside)
    for name in ("../outside0/job-1", "data", "link", ".", ".slipstream"):
        assert site.post("/api/remove", {"runs": [name]}).status == 404
    assert outside.exists()
    assert (site.workspace.folder / "data").exists()


def test_the_demo_starts_by_one_request(site):
    job = site.post("/api/demo", {}).json["job"]
    described = site.get(f"/job/{job}").text
    assert "simulated:cell" in described
    assert "slipstream train" in described


def test_an_empty_folder_offers_the_demo_and_data(site):
    page = site.get("/").text
    assert 'id="demo"' in page
    assert 'href="/new"' in page
    assert site.get("/api/runs").json["runs"] == []


def test_damaged_runs_searches_and_encoders_are_rows_of_their_own(site):
    out = site.workspace.folder / "runs"
    damaged = write_run(out, "job-1")
    (damaged / "metrics.json").write_text("{")
    search = write_run(out, "search-1", finished=False)
    (search / "study.log").touch()
    encoder = write_run(out, "encoder-1", finished=False)
    text = (encoder / "config.toml").read_text()
    (encoder / "config.toml").write_text(
        re.sub('objective = "[a-z]+"', 'objective = "masked"', text)
    )
    rows = {row["name"]: row for row in site.get("/api/runs").json["runs"]}
    assert rows["job-1"]["state"] == "damaged"
    assert rows["job-1"]["note"]
    assert rows["search-1"]["kind"] == "search"
    assert rows["encoder-1"]["kind"] == "pretrain"
