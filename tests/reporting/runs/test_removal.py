"""Runs are removed as a whole, never under a process that writes to them."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import slipstream
from slipstream import UserError, runs


def copies(out, count):
    """More runs like `one`, the lower the number the lower the error."""
    (source,) = out.glob("one-*")
    for number in range(count):
        folder = out / f"copy{number}"
        shutil.copytree(source, folder)
        (folder / "manifest.json").unlink()
        config = folder / "config.toml"
        config.write_text(config.read_text().rpartition("#")[0])
        summary = json.loads((folder / "metrics.json").read_text())
        summary["metrics"]["test"]["mae"] = number / 1000
        (folder / "metrics.json").write_text(json.dumps(summary))


def names(out):
    return sorted(path.name.partition("-")[0] for path in out.iterdir())


def test_runs_are_removed_by_name(out):
    (row,) = slipstream.remove_runs("one")
    assert row.name == "one-20260101T000000Z"
    assert names(out) == ["three"]
    with pytest.raises(UserError, match="there is no such run"):
        slipstream.remove_runs("three", "nothing")
    assert names(out) == ["three"]


def test_a_locked_run_and_those_beside_it_stay(out):
    (folder,) = out.glob("one-*")
    with (
        runs.lock_run(runs.Run(folder)),
        pytest.raises(UserError, match="is writing to this run; nothing was removed"),
    ):
        slipstream.remove_runs("three", "one")
    assert names(out) == ["one", "three"]


def test_a_probe_with_a_locked_run_inside_stays(out):
    (folder,) = out.glob("one-*")
    probe = out / "probe"
    (probe / "scratch").parent.mkdir()
    (probe / "labels.toml").touch()
    (probe / "encoder.toml").touch()
    folder.rename(probe / "scratch")
    with (
        runs.lock_run(runs.Run(probe / "scratch")),
        pytest.raises(UserError, match="scratch: process"),
    ):
        slipstream.remove_runs("probe")
    slipstream.remove_runs("probe")
    assert names(out) == ["three"]


def test_a_folder_that_is_no_run_is_never_removed(out):
    for name in ("model", "checkpoints"):
        (out / "project" / name).mkdir(parents=True)
    for name in ("config.toml", "metrics.json"):
        (out / "project" / name).write_text("")
    for name in ("project", out / "project", out, out.parent, "runs/", "."):
        with pytest.raises(UserError):
            slipstream.remove_runs(name)
    slipstream.prune_runs(keep_best=0, unfinished=True)
    assert names(out) == ["project"]


def test_a_damaged_run_can_be_removed(out):
    (folder,) = out.glob("one-*")
    (folder / "config.toml").unlink()
    slipstream.remove_runs(folder.name)
    assert names(out) == ["three"]


def test_of_a_link_only_the_link_goes(out, tmp_path):
    (folder,) = out.glob("one-*")
    folder.rename(tmp_path / "kept-elsewhere")
    folder.symlink_to(tmp_path / "kept-elsewhere")
    slipstream.remove_runs("one")
    assert names(out) == ["three"]
    assert (tmp_path / "kept-elsewhere" / "config.toml").exists()


def test_links_in_a_run_go_and_what_they_lead_to_stays(out, tmp_path):
    (folder,) = out.glob("one-*")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("a,b")
    (folder / "data").symlink_to(tmp_path / "data")
    (folder / "model" / "a.csv").symlink_to(tmp_path / "data" / "a.csv")
    (folder / "gone").symlink_to("nothing")
    slipstream.remove_runs("one")
    assert names(out) == ["three"]
    assert (tmp_path / "data" / "a.csv").read_text() == "a,b"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_that_cannot_be_removed_stays_whole(out):
    (folder,) = out.glob("one-*")
    before = sorted(folder.rglob("*"))
    (folder / "model").chmod(0o500)
    try:
        with pytest.raises(UserError, match="model: is protected against writing; nothing was rem"):
            slipstream.remove_runs("three", "one")
    finally:
        (folder / "model").chmod(0o700)
    assert names(out) == ["one", "three"]
    assert sorted(folder.rglob("*")) == before


def test_pruning_keeps_the_best(out):
    copies(out, 4)
    rows = slipstream.prune_runs(keep_best=2, dry_run=True)
    assert sorted(row.name.partition("-")[0] for row in rows) == ["copy2", "copy3", "one", "three"]
    assert len(names(out)) == 6
    slipstream.prune_runs(keep_best=2)
    assert names(out) == ["copy0", "copy1"]
    assert slipstream.prune_runs(keep_best=2) == []


def test_pruning_keeps_runs_of_other_data_unfinished_runs_and_encoders_in_use(out):
    copies(out, 3)
    config = out / "copy1" / "config.toml"
    config.write_text(config.read_text().replace("horizon = 4", "horizon = 5"))
    (out / "copy2" / "metrics.json").unlink()
    encoder = out / "encoder"
    encoder.mkdir()
    (encoder / "model").mkdir()
    (encoder / "config.toml").write_text('[train]\nobjective = "masked"\n')
    metrics = {"metrics": {"val": {"mae": 1.0}}, "baselines": {}}
    (encoder / "metrics.json").write_text(json.dumps(metrics))
    (encoder / "events.jsonl").write_text('{"event": "start", "at_s": 0.0}\n')
    shutil.copytree(encoder, out / "better")
    better = {"metrics": {"val": {"mae": 0.5}}, "baselines": {}}
    (out / "better" / "metrics.json").write_text(json.dumps(better))
    config = out / "copy0" / "config.toml"
    config.write_text(
        config.read_text().replace("[train]\n", f'[train]\ninit_from = "{encoder}"\n')
    )
    pruned = slipstream.prune_runs(keep_best=0, dry_run=True)
    assert "copy2" not in {row.name for row in pruned}
    slipstream.prune_runs(keep_best=1)
    assert names(out) == ["better", "copy0", "copy1", "copy2", "encoder"]
    slipstream.prune_runs(keep_best=1, unfinished=True)
    assert names(out) == ["better", "copy0", "copy1", "encoder"]


def test_pruning_leaves_a_run_that_is_written_to(out):
    (folder,) = out.glob("one-*")
    with runs.lock_run(runs.Run(folder)):
        slipstream.prune_runs(keep_best=0)
    assert names(out) == ["one"]
    with pytest.raises(UserError, match="expected 0 or more"):
        slipstream.prune_runs(keep_best=-1)
