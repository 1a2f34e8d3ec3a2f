"""What the screens answer: rows, forms, runs and files, also for odd names and missing folders."""

from __future__ import annotations

import io
import json
import zipfile
from urllib.parse import quote

import pytest

from slipstream.app import forms, settings
from slipstream.app.workspace import Workspace
from slipstream.config import Config
from tests.app.conftest import start_site, write_run

ODD = ["<script>alert(1)</script>", '"onload="x', "a\nb", "ü &amp; ' `", "x" * 200]


def test_runs_of_the_folder_and_of_runs_below_it_are_listed(site):
    folder = site.workspace.folder
    write_run(folder, "job-1", test=0.5)
    write_run(folder / "runs", "job-2", finished=False)
    rows = {row["id"]: row for row in site.get("/api/runs").json["runs"]}
    assert rows.keys() == {"job-1", "runs/job-2"}
    assert rows["job-1"]["state"] == "finished"
    assert rows["job-1"]["error"] == "0.5000"
    assert rows["runs/job-2"]["state"] == "stopped"


def test_a_run_that_is_copied_in_changed_or_removed_shows_up(site):
    folder = site.workspace.folder
    assert site.get("/api/runs").json["runs"] == []
    run = write_run(folder, "job-1", finished=False)
    assert [row["state"] for row in site.get("/api/runs").json["runs"]] == ["stopped"]
    (run / "config.toml").write_text("x = 1\n")
    assert [row["state"] for row in site.get("/api/runs").json["runs"]] == ["stopped"]
    run.rename(folder / ".gone")
    assert site.get("/api/runs").json["runs"] == []


def test_tags_and_notes_are_in_the_run_folder(site):
    run = write_run(site.workspace.folder, "job-1")
    answer = site.post("/api/annotate/job-1", {"tags": [" good ", "good", "b"], "remark": "<b>x"})
    assert answer.json == {"tags": ["good", "b"], "remark": "<b>x"}
    assert json.loads((run / "ui.json").read_text())["tags"] == ["good", "b"]
    row = site.get("/api/runs").json["runs"][0]
    assert row["tags"] == ["good", "b"]
    assert row["state"] == "finished"
    site.post("/api/annotate/job-1", {"tags": [], "remark": ""})
    assert not (run / "ui.json").exists()
    too_long = site.post("/api/annotate/job-1", {"tags": [], "remark": "x" * 10_001})
    assert too_long.status == 400
    assert "10,000" in too_long.json["error"]


@pytest.mark.parametrize("name", ODD)
def test_names_with_markup_are_escaped(site, name):
    name = name.replace("/", "_")
    run = write_run(site.workspace.folder, "job-1")
    run.rename(site.workspace.folder / name)
    site.post(f"/api/annotate/{quote(name)}", {"tags": ["<i>t"], "remark": "<script>x"})
    page = site.get(f"/run/{quote(name)}")
    assert page.status == 200
    assert "<script>alert" not in page.text
    assert '"onload=' not in page.text
    assert site.get("/api/runs").json["runs"][0]["name"] == name


@pytest.mark.parametrize(
    "run",
    [
        "..",
        "../x",
        "%2e%2e/%2e%2e/etc",
        ".slipstream",
        "job-1/../job-1/model",
        "/etc",
        "x" * 10_000,
        "a%00b",
        "job-1/",
        "job-1/model",
        ".",
        "job-1%2f..",
    ],
)
def test_no_other_folder_is_shown_as_a_run(site, run):
    write_run(site.workspace.folder, "job-1")
    for path in (f"/run/{run}", f"/report/{run}", f"/download/config.toml/{run}"):
        assert site.get(path).status in (400, 404), path


@pytest.mark.parametrize("file", ["lock.json", "..%2fx", "model", "ui.json", "a%20b"])
def test_only_fixed_names_are_downloaded(site, file):
    write_run(site.workspace.folder, "job-1")
    assert site.get(f"/download/{file}/job-1").status == 404


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "inside").mkdir()
    secret = tmp_path / "outside" / "secret"
    secret.write_text("secret")
    outside = write_run(tmp_path / "outside", "job-out")
    site, stop = start_site(tmp_path / "inside")
    try:
        run = write_run(site.workspace.folder, "job-1")
        (site.workspace.folder / "job-link").symlink_to(outside)
        (run / "report.html").unlink()
        (run / "report.html").symlink_to(secret)
        (run / "model" / "link").symlink_to(secret)
        (run / "model" / "inside").symlink_to(run / "config.toml")
        assert [row["name"] for row in site.get("/api/runs").json["runs"]] == ["job-1"]
        assert site.get("/run/job-link").status == 404
        assert site.get("/report/job-1").status == 404
        assert site.get("/download/report.html/job-1").status == 404
        packed = zipfile.ZipFile(io.BytesIO(site.get("/download/model.zip/job-1").body))
        assert packed.namelist() == ["model/weights.bin"]
    finally:
        stop()


def test_the_report_has_an_origin_of_its_own(site):
    write_run(site.workspace.folder, "job-1")
    answer = site.get("/report/job-1")
    assert answer.text == "<p>report</p>"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts")
    assert "allow-same-origin" not in policy
    saved = site.get("/download/report.html/job-1")
    assert saved.headers["content-disposition"].startswith("attachment")


def test_a_run_that_vanished_is_shown_as_such(site):
    answer = site.get("/run/job-9")
    assert answer.status == 404
    assert "there is no such run" in answer.text
    assert site.post("/api/stop/job-9", {}).status == 404
    assert site.get("/job/nothing").status == 404


def check(site, **values):
    named = {name.replace("__", "."): value for name, value in values.items()}
    return site.post("/api/check", {"settings": named}).json


def test_a_form_is_checked_with_the_message_of_the_command_line(site):
    (site.workspace.folder / "a.csv").write_text("x,y\n1,2\n")
    answer = check(site, data__path="a.csv", train__lr="-1", model__kind="lstn")
    assert answer["problems"]["train.lr"] == 'train.lr is -1; it should be greater than 0 or "auto"'
    assert 'did you mean "lstm"?' in answer["problems"]["model.kind"]
    good = check(site, data__path="a.csv", train__lr="1e-2", name="a", data__targets='["y"]')
    assert good["problems"] == {}
    assert 'targets = ["y"]' in good["toml"]
    assert "lr = 0.01" in good["toml"]
    assert good["command"].startswith("slipstream train a.toml")


@pytest.mark.parametrize("path", ["../a.csv", "/etc/passwd", "x/../../a.csv"])
def test_data_outside_of_the_folder_are_refused(site, path):
    answer = check(site, data__path=path)
    assert "is not below" in answer["problems"][""]
    assert site.get(f"/api/inspect?path={quote(path)}").status == 404


@pytest.mark.parametrize("path", ["s3://bucket/a.csv", "file:///etc/passwd", "gs:/bucket/a.csv"])
def test_data_in_object_storage_are_refused(site, path):
    answer = check(site, data__path=path)
    assert "is in object storage" in answer["problems"][""]
    refused = site.get(f"/api/inspect?path={quote(path)}")
    assert refused.status == 400
    assert "is in object storage" in refused.json["error"]


@pytest.mark.parametrize("setting", ["train.init_from", "data.labels"])
def test_other_files_outside_of_the_folder_are_refused(site, setting):
    values = {"data.path": "simulated:cell", setting: "../x"}
    problems = site.post("/api/check", {"settings": values}).json["problems"]
    assert "is not below" in problems[""]
    joined = {
        "data.path": "simulated:cell",
        "data.prepare": '[{step = "join", path = "/etc/x.csv"}]',
    }
    assert site.post("/api/check", {"settings": joined}).json["problems"]


def test_a_class_to_import_needs_permission(tmp_path):
    values = {"data__path": "simulated:cell", "model__kind": "nets:Mixer"}
    for allow_code in (False, True):
        site, stop = start_site(tmp_path, allow_code=allow_code)
        try:
            problems = check(site, **values)["problems"]
            assert bool(problems) is not allow_code
            started = site.post(
                "/api/start", {"settings": {k.replace("__", "."): v for k, v in values.items()}}
            )
            assert (started.status == 200) is allow_code
        finally:
            stop()


def test_a_form_starts_a_job_that_is_a_config_and_a_command(site):
    settings_ = {"data.path": "simulated:cell", "name": "mine", "train.epochs": "3"}
    job = site.post("/api/start", {"settings": settings_}).json["job"]
    request = site.workspace.store.read(job)
    assert request.state == "queued"
    assert request.command[0] == "train"
    text = (site.workspace.store.jobs / job / "mine.toml").read_text()
    assert "epochs = 3" in text
    assert 'path = "simulated:cell"' in text
    assert "mine.toml" in site.get(f"/job/{job}").text
    assert site.post(f"/api/job/{job}/stop", {}).json == {"state": "cancelled"}


def test_a_wrong_form_starts_nothing(site):
    answer = site.post("/api/start", {"settings": {"data.path": "simulated:cell", "seed": "x"}})
    assert answer.status == 400
    assert "seed" in answer.json["problems"]
    assert site.workspace.store.list_recent() == []
    assert site.post("/api/check", {"settings": {"out": "/tmp"}}).json["problems"]
    assert site.post("/api/check", {"settings": 5}).status == 400


def test_every_setting_of_the_config_has_a_control_with_help():
    controls = forms.list_controls()
    names = {control.setting for control in controls}
    assert {"data.targets", "data.split.by", "model.hidden", "engine.device", "seed"} <= names
    assert not names & {"out", "data.path"}
    assert [control.setting for control in controls if not control.help] == []


def test_a_form_filled_from_a_config_gives_that_config(tmp_path):
    workspace = Workspace(tmp_path.resolve(), warm=False)
    config = settings.load_start(workspace, "demo")
    checked = settings.check_form(workspace, forms.fill(config) | {"data.path": "simulated:cell"})
    assert checked.config == config


@pytest.mark.parametrize("preset", settings.list_presets(), ids=lambda preset: preset.name)
def test_presets_are_valid(preset):
    assert Config.model_validate(preset.settings)
    assert preset.title


def test_a_run_can_be_the_start_of_another(site):
    write_run(site.workspace.folder, "job-1")
    page = site.get("/new?start=run:job-1").text
    values = json.loads(page.partition('id="values">')[2].partition("</script>")[0])["values"]
    assert values["data.targets"] == '["y"]'
    assert "train.weight_decay" not in values
    assert values["model.normalize"] == "none"  # else the data would decide again
    assert site.get("/new?start=run:../x").status == 404
    assert site.get("/new?start=preset:none").status == 404


def test_a_stopped_run_is_resumed_once(site):
    write_run(site.workspace.folder, "job-1", finished=False)
    job = site.post("/api/resume/job-1", {}).json["job"]
    command = site.workspace.store.read(job).command
    assert command[:2] == ("train", "--resume")
    again = site.post("/api/resume/job-1", {})
    assert again.status == 400
    assert "in the queue already" in again.json["error"]


def test_a_finished_run_is_trained_longer(site):
    write_run(site.workspace.folder, "job-1")
    assert site.post("/api/resume/job-1", {}).status == 400
    assert site.post("/api/resume/job-1", {"epochs": "--force"}).status == 400
    job = site.post("/api/resume/job-1", {"epochs": 9}).json["job"]
    assert site.workspace.store.read(job).command[-2:] == ("--set", "train.epochs=9")


@pytest.mark.slow
def test_a_file_is_inspected_in_a_process_of_its_own(site):
    rows = "".join(f"2020-01-01 {hour:02d}:00,{hour},{hour * 2}\n" for hour in range(24))
    (site.workspace.folder / "a.csv").write_text("time,x,y\n" + rows)
    found = site.get("/api/inspect?path=a.csv").json
    assert [column["name"] for column in found["columns"]] == ["time", "x", "y"]
    assert found["values"]["data.time"] == "time"
    (site.workspace.folder / "bad.csv").write_bytes(b"\x00\x01\x02")
    bad = site.get("/api/inspect?path=bad.csv")
    assert bad.status == 400
    assert "bad.csv" in bad.json["error"]


def test_the_app_does_not_import_torch():
    import subprocess
    import sys

    code = (
        "import sys, slipstream.app.app, slipstream.app.jobs; "
        "import slipstream.cli.serving; "
        "assert not {'torch', 'pyarrow', 'numpy', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
