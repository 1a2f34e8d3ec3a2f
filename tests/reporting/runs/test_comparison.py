"""Runs side by side: settings that differ, metrics with intervals, curves."""

from __future__ import annotations

import shutil

import pytest

import slipstream
from slipstream import UserError, runs
from slipstream.base import statistics
from slipstream.reporting.runs import list_differences
from tests.conftest import close


def test_the_settings_that_differ_are_listed(out):
    comparison = slipstream.compare_runs("one", "three")
    names = [path.name for path in sorted(out.iterdir())]
    settings = {row["setting"]: (row[names[0]], row[names[1]]) for row in comparison.settings}
    assert settings["model.kind"] == ("mlp", "linear")
    assert settings["train.repeats"] == (1, 3)
    assert "name" not in settings
    assert "data.path" not in settings


def test_a_search_is_compared_by_the_settings_that_it_chose(out):
    (source,) = out.glob("three-*")
    (out / "search").mkdir()
    (source / "events.jsonl").rename(out / "search" / "events.jsonl")
    (out / "search" / "config.toml").write_text('[model]\nkind = "lstm"\n[tune]\ntrials = 3\n')
    (out / "search" / "study.log").touch()
    shutil.copytree(source, out / "search" / "retrained" / "best")
    comparison = slipstream.compare_runs("one", "search")
    settings = {row["setting"]: row["search"] for row in comparison.settings}
    assert settings["model.kind"] == "linear"
    assert not any(name.startswith("tune.") for name in settings)


def test_an_ensemble_is_compared_by_its_members(out):
    joined = slipstream.ensemble(slipstream.list_runs(sort="name"), out=out, quiet=True)
    (row,) = slipstream.list_runs(kind="ensemble")
    assert (row.run.name, row.model, row.state) == (joined.run.name, "mlp + linear", "finished")
    assert slipstream.evaluate(row)["run"] == str(row.run.resolve())
    assert row.test == joined.metrics["test"]["mae"]
    comparison = slipstream.compare_runs("one", joined)
    settings = {entry["setting"]: entry[row.name] for entry in comparison.settings}
    assert settings["members"] == [path.name for path in sorted(out.glob("[ot]*-*"))]


def test_settings_that_one_run_lacks_differ():
    rows = list_differences({"a": {"train": {"lr": 1.0}}, "b": {"seed": 0, "train": {"lr": 1.0}}})
    assert rows == [{"setting": "seed", "a": None, "b": 0}]


@pytest.mark.usefixtures("out")
def test_repeats_have_an_interval_and_a_single_model_has_none():
    comparison = slipstream.compare_runs("one", "three")
    one, three = (
        [row for row in comparison.metrics if row["run"] == r.name] for r in comparison.runs
    )
    mae = next(row for row in three if row["metric"] == "mae")
    lanes = runs.read_metrics(comparison.runs[1].run)["lanes"]
    interval = statistics.compute_t_interval([lane["metrics"]["test"]["mae"] for lane in lanes])
    close([mae["mean"], mae["low"], mae["high"]], list(interval))
    assert mae["n"] == 3
    assert "difference" not in mae  # the first run has no repeats
    assert all("mean" not in row for row in one)
    assert len(comparison.to_pandas()) == len(comparison.metrics)


def test_the_difference_of_repeats_has_an_interval_and_a_verdict(out):
    (source,) = out.glob("three-*")
    shutil.copytree(source, out / "same-20260103T000000Z")
    comparison = slipstream.compare_runs("three", "same")
    rows = {row["metric"]: row for row in comparison.metrics if row["run"].startswith("same")}
    over_seeds = [row for row in rows.values() if "mean" in row]
    assert {row["verdict"] for row in over_seeds} == {"no difference shown"}
    assert all(row["difference"] == 0 for row in over_seeds)
    assert {"mae", "rmse", "r2", "mase", "smape", "wape"} <= set(rows)
    assert comparison.settings == []


@pytest.mark.usefixtures("out")
def test_the_scores_of_intervals_are_compared_without_a_verdict():
    comparison = slipstream.compare_runs("three", "one")
    label = comparison.runs[0].name
    rows = {row["metric"]: row for row in comparison.metrics if row["run"] == label}
    summary = runs.read_metrics(comparison.runs[0].run)
    used = summary["ensemble"] if summary["uses"] == "ensemble" else summary
    assert rows["interval_crps"]["test"] == used["crps"]
    for level in ("80", "95"):
        for name in ("coverage", "width"):
            row = rows[f"{name}_{level}"]
            assert row["test"] == used[name][level]
            assert "verdict" not in row
    text = repr(comparison)
    for name in ("MASE", "sMAPE", "WAPE", "CRPS of intervals", "coverage, 80 % interval"):
        assert name in text


@pytest.mark.usefixtures("out")
def test_the_page_holds_curves_and_tables_and_needs_nothing_else(tmp_path):
    comparison = slipstream.compare_runs("one", "three")
    page = comparison.write_html(tmp_path / "new" / "page.html").read_text()
    assert page.count("<svg") == 1
    for row in comparison.runs:
        assert row.name in page
    assert "model.kind" in page
    assert "http" not in page
    assert "<script" not in page
    comparison.write_html(tmp_path / "new" / "page.html")  # its own page is replaced
    (tmp_path / "notes.html").write_text("precious")
    with pytest.raises(UserError, match="name another file"):
        comparison.write_html(tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text() == "precious"


def test_damaged_unfinished_and_unlike_runs_are_compared_with_a_note(out, tmp_path):
    (folder,) = out.glob("one-*")
    for name in ("metrics.json", "manifest.json", "events.jsonl"):
        (folder / name).unlink()
    (out / "broken").mkdir()
    (out / "broken" / "events.jsonl").write_text('{"event": "start", "at_s": 0.0}\n')
    comparison = slipstream.compare_runs("three", "one", "broken")
    assert "one-20260101T000000Z is stopped" in comparison.notes
    assert any("different data" in note for note in comparison.notes)
    page = comparison.write_html(tmp_path / "page.html").read_text()
    assert "No validation was logged by one-20260101T000000Z, broken." in page


@pytest.mark.usefixtures("out")
def test_fewer_than_two_runs_are_refused():
    with pytest.raises(UserError, match="at least two runs"):
        slipstream.compare_runs("one", "runs/one")


@pytest.mark.usefixtures("out")
def test_a_comparison_prints_its_metrics():
    comparison = slipstream.compare_runs("one", "three")
    assert "scaled MSE" in repr(comparison)
    assert "<td>model.kind</td>" in comparison._repr_html_()


def test_one_run_in_detail(out):
    details = slipstream.show_run("one")
    assert details["settings"]["model.kind"] == "mlp"
    assert "train.lr" not in details["settings"]
    assert details["summary"]["metrics"]["test"]["mae"] == details["test"]
    assert "baseline" in details["verdict"] or "loses" in details["verdict"]
    assert details["next"] == "slipstream predict runs/one-20260101T000000Z DATA"
    (folder,) = out.glob("one-*")
    (folder / "manifest.json").unlink()
    assert slipstream.show_run("one")["next"].startswith("slipstream train --resume runs/one")
    (folder / "config.toml").unlink()
    assert slipstream.show_run(folder)["next"] == f"slipstream runs remove {folder}"
