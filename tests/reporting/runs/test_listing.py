"""The table of runs: what they are, where they stand, how good they are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

import slipstream
from slipstream import UserError, runs
from slipstream.reporting.run_rows import rank, read_row, read_scores
from slipstream.runs import lock as locks


def add_run(out, name, config="", **files):
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    (folder / "events.jsonl").write_text('{"event": "start", "at_s": 0.0}\n')
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    return folder


@pytest.mark.usefixtures("out")
def test_a_finished_run_is_listed_with_its_error_and_the_best_baseline():
    newest, one = slipstream.list_runs()
    assert (one.name, one.kind, one.state, one.model) == (
        *("one-20260101T000000Z", "train", "finished", "mlp"),
    )
    assert one.data == "table.csv: a +4"
    assert one.at.isoformat() == "2026-01-01T00:00:00+00:00"
    metrics = runs.read_metrics(one.run)
    assert (one.metric, one.test) == ("mae", metrics["metrics"]["test"]["mae"])
    tests = {name: b["metrics"]["test"]["mae"] for name, b in metrics["baselines"].items() if b}
    assert one.baseline_error == min(tests.values()) == tests[one.baseline]
    assert one.against_baseline == one.test / one.baseline_error - 1
    assert (newest.name, newest.repeats) == ("three-20260102T000000Z", 3)


def test_runs_are_sorted_and_filtered(out):
    add_run(out, "stopped-20260103T000000Z", 'name = "x"\n')

    def names(**options):
        return [row.name.partition("-")[0] for row in slipstream.list_runs(**options)]

    assert names() == ["stopped", "three", "one"]
    assert names(sort="name") == ["one", "stopped", "three"]
    assert names(reverse=True) == ["one", "three", "stopped"]
    tests = {row.name: row.test for row in slipstream.list_runs(state="finished")}
    assert names(sort="test")[0] == min(tests, key=tests.get).partition("-")[0]
    assert names(sort="test")[-1] == "stopped"  # without an error it comes last
    assert names(state="stopped") == ["stopped"]
    assert names(name="thr") == names(name="thr*") == ["three"]
    assert names(data="table.csv", kind="train") == ["three", "one"]
    assert names(kind="search") == []
    for options in ({"state": "done"}, {"kind": "lstm"}, {"sort": "loss"}):
        with pytest.raises(UserError, match="choose one of"):
            names(**options)


@pytest.mark.usefixtures("out")
def test_a_metric_is_chosen_by_name():
    (one,) = slipstream.list_runs(name="one", metric="r2")
    metrics = runs.read_metrics(one.run)
    assert one.test == metrics["metrics"]["test"]["r2"]
    tests = [b["metrics"]["test"]["r2"] for b in metrics["baselines"].values() if b]
    assert one.baseline_error == max(tests)
    assert one.against_baseline == one.test - max(tests)
    (one,) = slipstream.list_runs(name="one", metric="scaled_mse")
    assert one.test == metrics["scaled"]["test"]["mse"]
    with pytest.raises(UserError, match="choose one of mae, rmse"):
        slipstream.list_runs(metric="mea")


@pytest.mark.usefixtures("out")
def test_runs_are_listed_by_the_scores_of_their_intervals():
    (three,) = slipstream.list_runs(name="three", metric="interval_crps")
    scores = runs.read_metrics(three.run)["ensemble"]
    assert (three.test, three.baseline_error) == (scores["crps"], None)
    first, last = slipstream.list_runs(metric="coverage_80", sort="test")
    assert (first.name, first.test) == (three.name, scores["coverage"]["80"])
    assert last.test is None  # it has no intervals
    # the best covers what it is to cover
    assert sorted([0.5, 0.98, 0.83], key=lambda share: rank(share, "coverage_80")) == [
        *(0.83, 0.98, 0.5),
    ]


def test_a_run_with_repeats_shows_what_it_predicts_with(out):
    path = next(out.glob("three-*")) / "metrics.json"
    summary = json.loads(path.read_text())
    for uses, section in (("ensemble", summary["ensemble"]), ("model", summary)):
        scores = read_scores("train", summary | {"uses": uses}, None)
        assert scores.test == section["metrics"]["test"]["mae"]
        assert scores.baseline is not None


def test_the_states_of_runs(out):
    (folder,) = out.glob("one-*")
    with runs.lock_run(runs.Run(folder)):
        row = read_row(folder)
        assert row.state == "running"
        assert "process" in row.note
        assert row.note.endswith("epoch 1 of 1")
    assert read_row(folder).state == "finished"
    runs.remove_manifest(runs.Run(folder))  # as when it is resumed
    assert read_row(folder).state == "stopped"
    (folder / "metrics.json").unlink()
    row = read_row(folder)
    assert (row.state, row.epochs, row.note) == ("stopped", 1, "after epoch 1 of 1")
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"event": "epoch", "epoch": tor')  # as a kill leaves it
    assert read_row(folder).state == "stopped"


def test_a_lock_that_a_killed_process_left_is_not_running(out):
    (folder,) = out.glob("one-*")
    holder = {"host": locks.platform.node(), "pid": 2**22 - 1, "since": 0.0, "by": "flock"}
    (folder / "lock.json").write_text(json.dumps(holder))
    assert read_row(folder).state == "finished"
    (folder / "lock.json").write_text(json.dumps(holder | {"host": "elsewhere"}))
    assert read_row(folder).state == "running"


@pytest.mark.parametrize(
    ("file", "text", "note"),
    [
        ("metrics.json", "{", "metrics.json"),
        ("metrics.json", "[]", "metrics.json"),
        ("metrics.json", '{"metrics": 3}', "metrics.json"),
        ("config.toml", "[[[", "config.toml cannot be read"),
        ("config.toml", None, "config.toml is missing"),
    ],
)
@pytest.mark.parametrize("manifest", [True, False])
def test_a_damaged_run_is_listed_with_what_is_wrong(out, file, text, note, manifest):
    (folder,) = out.glob("one-*")
    if not manifest:
        (folder / "manifest.json").unlink()
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    row = slipstream.list_runs(name="one")[0]
    assert row.state == "damaged"
    assert note in row.note
    assert len(slipstream.list_runs()) == 2


def test_a_changed_config_and_a_missing_model_are_damage(out):
    one, three = slipstream.list_runs(sort="name")
    config = one.run / "config.toml"
    config.write_text(config.read_text().replace("epochs = 1", "epochs = 2"))
    shutil.rmtree(three.run / "model")
    one, three = slipstream.list_runs(sort="name")
    assert (one.state, one.note) == ("damaged", "config.toml was changed since it was written")
    assert (three.state, three.note) == ("damaged", "model/ is missing")
    assert (out / "one-20260101T000000Z").exists()


@pytest.mark.parametrize("key", ["seconds", "epochs", "baselines", "spread", "judged_by", "scaled"])
@pytest.mark.parametrize("value", [None, 3, "x", [], {}])
def test_damage_without_checksums_is_survived(out, key, value):
    (folder,) = out.glob("three-*")
    (folder / "manifest.json").unlink()
    config = folder / "config.toml"
    config.write_text(config.read_text().rpartition("#")[0])  # as version 0.1 wrote it
    summary = json.loads((folder / "metrics.json").read_text()) | {key: value}
    (folder / "metrics.json").write_text(json.dumps(summary))
    rows = slipstream.list_runs()
    assert len(rows.to_pandas()) == 2
    assert slipstream.show_run("three")["name"] == folder.name
    assert slipstream.compare_runs(*rows).settings


def test_other_folders_and_files_are_no_runs(out):
    for name in ("model", "checkpoints"):
        (out / "project" / name).mkdir(parents=True)
    for name in ("config.toml", "metrics.json"):
        (out / "project" / name).write_text("")
    (out / ".hidden").mkdir()
    (out / ".hidden" / "config.toml").touch()
    (out / "comparison.html").touch()
    assert len(slipstream.list_runs()) == 2


def test_a_run_of_version_0_1_is_finished_without_checksums(out):
    (folder,) = out.glob("one-*")
    (folder / "manifest.json").unlink()
    config = folder / "config.toml"
    config.write_text(config.read_text().rpartition("#")[0])
    assert read_row(folder).state == "finished"


def test_kinds_of_runs_and_their_errors(out):
    mean = {"metrics": {"val": {"mae": 1.0}}}
    metrics = {"metrics": {"val": {"mae": 0.5}}, "baselines": {"mean": mean}}
    add_run(out, "encoder", '[train]\nobjective = "masked"\n', metrics_json=json.dumps(metrics))
    (out / "encoder" / "model").mkdir()
    best = {"metrics": {"test": {"mae": 0.25}}, "baselines": {"ridge": None}}
    search = {"test": {"best": best}, "pending": None}
    add_run(out, "search", trials_json="[]", metrics_json=json.dumps(search))
    add_run(out, "early", study_log="", metrics_json=json.dumps({"test": {}, "pending": "tests"}))
    probe = {
        "scaled": False,
        "judged_by": "log_loss",
        "ways": {"fine-tuned": {"metrics": {"log_loss": {"mean": 0.6}}}},
        "baselines": {"majority": {"log_loss": 0.8}},
    }
    folder = out / "probe"
    folder.mkdir()
    (folder / "labels.toml").write_text('[model]\nkind = "gru"\n')
    (folder / "encoder.toml").write_text("")
    (folder / "summary.json").write_text(json.dumps(probe))
    rows = {row.name: row for row in slipstream.list_runs()}
    assert (rows["encoder"].kind, rows["encoder"].test, rows["encoder"].val) == (
        *("pretrain", None, 0.5),
    )
    assert (rows["encoder"].baseline, rows["encoder"].against_baseline) == ("mean", -0.5)
    assert (rows["search"].kind, rows["search"].test) == ("search", 0.25)
    assert (rows["early"].kind, rows["early"].state) == ("search", "stopped")
    row = rows["probe"]
    assert (row.kind, row.metric, row.test, row.baseline) == ("probe", "log_loss", 0.6, "majority")
    assert row.state == "finished"


@pytest.mark.usefixtures("out")
def test_the_table_prints_and_becomes_a_data_frame():
    table = slipstream.list_runs()
    assert repr(table).splitlines()[0] == "2 runs"
    assert "one-20260101T000000Z" in repr(table)
    assert "<td>table.csv: a +4</td>" in table._repr_html_()
    frame = table.to_pandas()
    assert list(frame["state"]) == ["finished", "finished"]
    assert frame["test"].max() == max(row.test for row in table)
    assert list(slipstream.list_runs(state="damaged").to_pandas().columns) == list(frame.columns)


def test_a_folder_without_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert slipstream.list_runs() == []
    with pytest.raises(UserError, match="there is no such folder"):
        slipstream.list_runs("elsewhere")


def test_the_best_run_is_the_one_with_the_lowest_error(out):
    rows = slipstream.list_runs()
    assert slipstream.best_run().run == min(rows, key=lambda row: row.test).run
    best = slipstream.best_run(metric="r2")
    assert best.test == max(row.test for row in slipstream.list_runs(metric="r2"))
    (folder,) = out.glob("one-*")
    (folder / "manifest.json").unlink()
    config = folder / "config.toml"
    config.write_text(config.read_text().rpartition("#")[0].replace("horizon = 4", "horizon = 5"))
    with pytest.raises(UserError, match="on different data") as caught:
        slipstream.best_run()
    assert "table.csv: a +5: 1" in str(caught.value)
    assert slipstream.best_run(data="+5").run.name == folder.name
    with pytest.raises(UserError, match="holds no finished run"):
        slipstream.best_run(kind="search")


def test_listing_runs_loads_neither_torch_nor_the_config(out):
    code = (
        f"import sys, slipstream; assert len(slipstream.list_runs({str(out)!r})) == 2; "
        "import slipstream.cli, slipstream.reporting.terminal.results; "
        "wrong = {'torch', 'numpy', 'matplotlib', 'slipstream.config'} & sys.modules.keys(); "
        "assert not wrong, wrong"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
