"""Copies of runs, by `file://`: a folder of this machine that is used like object storage."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream import UserError
from slipstream.cli.commands import app
from slipstream.reporting.copies import copy_run
from slipstream.runs import lock as locks


@pytest.fixture
def run(trained, tmp_path):
    (source,) = trained.glob("one-*")
    return Path(shutil.copytree(source, tmp_path / "runs" / source.name))


@pytest.fixture
def bucket(tmp_path):
    return f"file://{tmp_path}/bucket"


def read_all(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_goes_there_and_back_with_every_byte(run, bucket, tmp_path):
    sent = copy_run(run, bucket)
    assert sent["copied_files"] == sent["files"] == len(read_all(run))
    assert sent["copied_bytes"] == sum(map(len, read_all(run).values()))
    back = copy_run(sent["to"], tmp_path / "back")
    folder = Path(back["to"])
    assert folder == tmp_path / "back" / run.name
    assert read_all(folder) == read_all(run)
    assert (folder / "config.toml").stat().st_mtime == pytest.approx(
        (run / "config.toml").stat().st_mtime
    )
    assert [path.name for path in (tmp_path / "back").iterdir()] == [run.name]
    assert slipstream.list_runs(tmp_path / "back")[0].state == "finished"


def test_a_repeated_copy_sends_only_what_has_changed(run, bucket, tmp_path):
    copy_run(run, bucket)
    assert copy_run(run, bucket)["copied_files"] == 0
    (run / "report.html").write_text("another report")
    (run / "notes.txt").write_text("new")
    assert copy_run(run, bucket)["copied_files"] == 2
    (run / "notes.txt").unlink()
    assert copy_run(run, bucket)["copied_files"] == 0
    assert not (tmp_path / "bucket" / run.name / "notes.txt").exists()
    again = copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert again["copied_files"] == len(read_all(run))
    assert copy_run(f"{bucket}/{run.name}", tmp_path / "back")["copied_files"] == 0


def test_an_interrupted_copy_is_not_taken_for_a_whole_one_and_is_completed(run, bucket, tmp_path):
    def interrupt(done, total):
        if done == total:  # with the last file, metrics.json
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_run(run, bucket, show=interrupt)
    with pytest.raises(UserError, match="the copy was interrupted"):
        copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert copy_run(run, bucket)["copied_files"] == 1
    copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert read_all(tmp_path / "back" / run.name) == read_all(run)


def test_an_interrupted_way_back_leaves_no_run_and_is_continued(run, bucket, tmp_path):
    copy_run(run, bucket)
    place = tmp_path / "bucket" / run.name
    weights = (place / "model" / "weights.safetensors").read_bytes()
    (place / "model" / "weights.safetensors").write_bytes(weights[:-1] + b"x")
    with pytest.raises(UserError, match=r"weights.safetensors: is damaged .*copy.json"):
        copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert slipstream.list_runs(tmp_path / "back") == []
    (place / "model" / "weights.safetensors").write_bytes(weights)
    back = copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert back["copied_files"] < len(read_all(run))
    assert read_all(Path(back["to"])) == read_all(run)


def test_a_run_that_a_process_writes_to_is_refused(run, bucket, tmp_path):
    with (
        locks.hold_lock(run),
        pytest.raises(UserError, match=f"process {os.getpid()} on .* writes"),
    ):
        copy_run(run, bucket)
    assert not (tmp_path / "bucket").exists()


def test_a_stopped_run_is_copied_with_its_checkpoints_and_resumes_there(run, bucket, tmp_path):
    for name in ("metrics.json", "manifest.json"):
        (run / name).unlink()
    copy_run(run, bucket)
    (folder,) = (tmp_path / "bucket").iterdir()
    assert list((folder / "checkpoints").iterdir())
    copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert slipstream.list_runs(tmp_path / "back")[0].state == "stopped"


def test_a_damaged_run_is_not_sent(run, bucket, tmp_path):
    path = run / "model" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"weights.safetensors: is damaged .*manifest.json"):
        copy_run(run, bucket)
    assert not (tmp_path / "bucket").exists()


def test_other_runs_and_later_states_are_not_replaced(run, bucket, tmp_path):
    copy_run(run, bucket)
    log = run / "events.jsonl"
    text = log.read_text()
    log.write_text(text.replace('"at_s"', '"at_S"', 1))
    with pytest.raises(UserError, match="copy of another run of this name"):
        copy_run(run, bucket)
    log.write_text(text.splitlines(keepends=True)[0])
    with pytest.raises(UserError, match="a later state of this run"):
        copy_run(run, bucket)
    log.write_text(text + text.splitlines(keepends=True)[-1])
    with pytest.raises(UserError, match=r"exists and differs from .*events.jsonl"):
        copy_run(f"{bucket}/{run.name}", run.parent)
    (tmp_path / "bucket" / run.name / "copy.json").unlink()
    with pytest.raises(UserError, match=r"no copy.json is there"):
        copy_run(run, bucket)


def test_a_copy_of_other_tools_is_verified_by_the_manifests(run, bucket, tmp_path):
    folder = tmp_path / "bucket" / run.name
    shutil.copytree(run, folder)
    copy_run(f"{bucket}/{run.name}", tmp_path / "back")
    assert read_all(tmp_path / "back" / run.name) == read_all(run)
    (folder / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"plan.json: is damaged"):
        copy_run(f"{bucket}/{run.name}", tmp_path / "other")


@pytest.mark.parametrize("name", ["../../evil", "/evil", "C:/evil", "a\\..\\evil", "evil\0"])
def test_a_listing_cannot_write_outside_of_the_run(run, bucket, tmp_path, name):
    copy_run(run, bucket)
    path = tmp_path / "bucket" / run.name / "copy.json"
    listing = json.loads(path.read_text())
    listing["files"][name] = listing["files"]["config.toml"]
    path.write_text(json.dumps(listing))
    with pytest.raises(UserError, match="is no name of a file below a run"):
        copy_run(f"{bucket}/{run.name}", tmp_path / "back")


def test_what_is_no_copy_is_refused_with_the_fix(run, bucket, tmp_path):
    with pytest.raises(UserError, match="both on this machine"):
        copy_run(run, tmp_path)
    with pytest.raises(UserError, match="both on object storage"):
        copy_run("s3://a/b", "s3://c")
    with pytest.raises(
        UserError, match=r"ftp://me:\*\*\*@h/runs: runs are copied to and from s3://"
    ):
        copy_run(run, "ftp://me:secret@h/runs")
    copy_run(run, bucket)
    with pytest.raises(UserError, match=f'there is no run; did you mean "{run.name}"'):
        copy_run(f"{bucket}/{run.name}x", tmp_path / "back")
    with pytest.raises(UserError, match=r'slipstream.copy_run\("file://'):
        slipstream.evaluate(f"{bucket}/{run.name}")
    with pytest.raises(UserError, match="credentials"):
        copy_run(run, "s3://key:secret@bucket/runs")


def test_the_command_prints_what_was_copied(run, bucket, tmp_path):
    def invoke(*words):
        return CliRunner().invoke(app, ["copy", *map(str, words)])

    count = len(read_all(run))
    assert f"{count} files" in invoke(run, bucket).stdout
    assert f"all {count} files are there already" in invoke(run, bucket).stdout
    shown = invoke(f"{bucket}/{run.name}", tmp_path / "back", "--json")
    assert json.loads(shown.stdout)["copied_files"] == count
    wrong = invoke(f"{bucket}/none", tmp_path / "back")
    assert wrong.exit_code == 2
    assert "there is no run" in wrong.stderr


def test_copies_are_listed_like_runs(run, bucket):
    copy_run(run, bucket)
    (local,), (copied,) = slipstream.list_runs(run.parent), slipstream.list_runs(bucket)
    different = {name for name, value in local.to_dict().items() if copied.to_dict()[name] != value}
    assert different <= {"run", "age_s"}
    assert copied.to_dict()["run"] == f"{bucket}/{run.name}"
    shown = CliRunner().invoke(app, ["runs", bucket])
    assert run.name in shown.stdout
    with pytest.raises(UserError, match="no such folder, or it is empty"):
        slipstream.list_runs(f"{bucket}/none")
    with pytest.raises(UserError, match="removed on this machine only"):
        slipstream.prune_runs(bucket)


def test_an_incomplete_copy_is_not_listed(run, bucket, tmp_path):
    copy_run(run, bucket)
    path = tmp_path / "bucket" / run.name / "copy.json"
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    assert slipstream.list_runs(bucket) == []


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "last", "new.csv", "--out", "s3://bucket/p.csv"),
        ("evaluate", "last", "--predictions", "s3://bucket/p.parquet"),
        ("export", "last", "--to", "onnx", "--out", "s3://bucket/model"),
        ("report", "last", "--out", "s3://bucket/page"),
        ("inspect", "new.csv", "--write", "s3://bucket/job.toml"),
        ("train", "--out", "s3://bucket/runs"),
    ],
)
def test_what_is_written_to_object_storage_otherwise_is_refused(words):
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert shown.exit_code == 2
    assert "slipstream copy RUN URL" in shown.stderr


LINKS = ["notes.txt", "model/notes.txt", "metrics.json", "plots", "report.html"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_a_run_uploads_nothing(run, bucket, tmp_path, name):
    """A run that somebody else has made may hold a link to a private file."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("secret")
    link = run / name
    link.unlink(missing_ok=True)
    link.symlink_to(private if name == "plots" else private / "key")
    with pytest.raises(UserError) as caught:
        copy_run(run, bucket)
    assert str(caught.value) == (
        f"{link}: is a link out of the run's folder, which is not followed; put the file in its "
        "place, or remove the link"
    )
    assert not (tmp_path / "bucket").exists()


def test_links_inside_of_a_run_are_left_out(run, bucket, tmp_path):
    (run / "latest").symlink_to("metrics.json")
    (run / "folder").symlink_to(run / "model")
    (run / "gone").symlink_to("nothing")
    sent = copy_run(run, bucket)
    names = set(read_all(tmp_path / "bucket" / run.name))
    assert not names & {"latest", "gone"}
    assert not any(name.startswith("folder") for name in names)
    assert "metrics.json" in names
    assert sent["files"] == len(names) - 1  # copy.json


USES = {
    "evaluate": lambda run, _: slipstream.evaluate(run, quiet=True),
    "predict": lambda run, data: slipstream.predict(run, data),
    "export": lambda run, data: slipstream.export(run, to="hub", out=run.parent / "out", data=data),
    "report": lambda run, _: slipstream.report(run),
    "load": lambda run, _: slipstream.load(run),
    "stream": lambda run, _: slipstream.Stream(run),
    "ensemble": lambda run, _: slipstream.ensemble([run, run], quiet=True),
    "follow": lambda run, _: slipstream.follow(run, "tensorboard", out=str(run.parent / "board")),
    "resume": lambda run, _: slipstream.train(resume=run, quiet=True),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_reads_a_run_with_a_link_out_of_it(run, tmp_path, use):
    (tmp_path / "private").write_text("secret")
    (run / "predictions.parquet").unlink()
    (run / "predictions.parquet").symlink_to(tmp_path / "private")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"predictions.parquet: is a link out of the run's folder"):
        USES[use](run, {"time": [1], "a": [1.0]})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_with_a_link_is_listed_as_damaged_and_not_read(run, tmp_path):
    (tmp_path / "private").write_text('{"metrics": {}}')
    (run / "metrics.json").unlink()
    (run / "metrics.json").symlink_to(tmp_path / "private")
    (row,) = slipstream.list_runs(run.parent)
    assert (row.state, row.note) == (
        "damaged",
        "metrics.json is no file of a run but leads elsewhere; it is not read",
    )


def test_a_fifo_in_a_run_blocks_nothing(run, bucket):
    (run / "events.jsonl").unlink()
    os.mkfifo(run / "events.jsonl")
    assert [row.state for row in slipstream.list_runs(run.parent)] == ["damaged"]
    for use in (lambda: copy_run(run, bucket), lambda: slipstream.report(run)):
        with pytest.raises(UserError, match=r"events.jsonl: is a FIFO, a socket or a device"):
            use()
