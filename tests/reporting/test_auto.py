"""What a user sees of `slipstream auto`: the terminal, the report, the list of runs."""

from __future__ import annotations

import copy
import html
import io
import shutil

import pyarrow.csv as csv
import pytest
from rich.console import Console

import slipstream
from slipstream import runs
from slipstream.reporting.plots.search import draw_candidates, draw_progress
from slipstream.reporting.terminal.results import print_auto
from slipstream.reporting.wording import describe_auto, describe_members, was_trained
from tests.conftest import small_config, waves


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    csv.write_csv(waves(900, columns=2), folder / "waves.csv")
    return slipstream.auto(
        folder / "waves.csv",
        targets="a",
        horizon=4,
        minutes=0.2,
        overrides={"out": str(folder / "runs"), "engine.device": "cpu"},
        quiet=True,
    )


def read(path):
    return html.unescape(path.read_text(encoding="utf-8"))


def print_at(study, width):
    stream = io.StringIO()
    print_auto(study.summary, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def test_the_report_shows_the_answer_and_everything_that_was_tried(study):
    page = read(slipstream.report(study.run))
    assert study.verdict in page
    assert "lowest validation" not in page
    assert "retrained/best/report.html" in page
    assert 'id="plot-data"' in page  # the predictions
    for row in study.summary["leaderboard"]:
        assert row["name"] in page
        assert row["what"] in page
    for heading in ("Leaderboard", "On the test set", "Candidates", "Report of the model"):
        assert heading in page
    assert "<h2>Trials" not in page


def test_a_search_without_a_network_has_a_report(study, tmp_path):
    folder = tmp_path / "baselines"
    shutil.copytree(study.run, folder)
    (folder / "manifest.json").unlink()
    summary = runs.read_metrics(folder)
    rows = [row for row in summary["leaderboard"] if row["state"] == "baseline"]
    rows[0]["weight"] = 1.0
    changes = {
        "leaderboard": rows,
        "trials": {"finished": 0, "pruned": 0, "failed": 0},
        "members": [],
    }
    runs.write_json(folder / "trials.json", [])
    runs.write_metrics(runs.Run(folder), {**summary, **changes})
    page = read(slipstream.report(folder))
    assert "networks: none" in page
    assert f"model: {rows[0]['name']}" in page
    assert "The search" not in page


def test_the_report_of_the_model_is_there_too(study):
    page = read(study.run / "retrained" / "best" / "report.html")
    assert "Comparison with baselines" in page
    assert "training windows per second" not in page


def test_a_narrow_terminal_shows_a_line_per_candidate(study):
    narrow, wide = (print_at(study, width) for width in (80, 160))
    assert all(len(line) <= 80 for line in narrow)
    shown = [row for row in study.summary["leaderboard"] if row["val"] is not None]
    lines = [line for line in narrow if line.startswith("│")]
    assert len(lines) == len(shown)
    assert any("settings" in line for line in wide)
    assert any(shown[0]["what"][:20] in line for line in wide)


def test_the_list_of_runs_says_what_it_answers_with(study):
    (row,) = slipstream.list_runs(study.run.parent)
    assert row.kind == "auto"
    members = [row for row in study.summary["leaderboard"] if row["weight"] > 0]
    expected = members[0]["kind"] if len(members) == 1 else "ensemble of "
    assert row.model.startswith(expected)
    assert row.test == pytest.approx(study.summary["metrics"]["test"]["mae"])
    shown = slipstream.show_run(study.run)
    assert shown["verdict"] == study.verdict
    assert not [name for name in shown["settings"] if name.startswith("tune.")]
    assert slipstream.list_runs(study.run.parent, kind="auto")
    assert not slipstream.list_runs(study.run.parent, kind="search")


def test_it_is_compared_with_a_run_on_the_same_rows(study, tmp_path):
    config = slipstream.load(study.run / "retrained" / "best").config
    data = config.data.model_dump(include={"path", "time", "inputs", "targets", "horizon"})
    trained = slipstream.train(small_config(tmp_path, data=data | {"context": 24}), quiet=True)
    comparison = slipstream.compare_runs(study.run, trained.run)
    assert not comparison.incomparable
    assert {row["metric"] for row in comparison.metrics} >= {"mae", "rmse"}
    assert comparison.paired


def test_a_stopped_one_is_resumed_by_its_own_command(study, tmp_path):
    folder = tmp_path / "stopped"
    shutil.copytree(study.run, folder)
    (folder / "metrics.json").unlink()
    (folder / "manifest.json").unlink()
    assert slipstream.show_run(folder)["next"] == f"slipstream auto --resume {folder}"
    assert str(runs.suggest_resume(folder)) == f"slipstream auto --resume {folder}"


def make_row(number, **values):
    row = {"name": f"trial {number}", "kind": "gru", "what": "", "val": 0.1 + number}
    row |= {"val_sd": 0.05, "test": None, "train_s": 1.0, "parameters": None, "weight": 0.0}
    return row | {"state": "finished", "stopped": None} | values


def test_candidates_draws_the_best_and_every_member_and_baseline():
    rows = [make_row(number) for number in range(40)]
    rows[30]["weight"] = 0.5
    rows[35] |= {"name": "ridge", "state": "baseline"}
    rows.append(make_row(99, val=None, state="failed"))
    page = draw_candidates(rows, "scaled MSE")
    assert "gru, trial 19" in page
    assert "gru, trial 20" not in page
    assert "gru, trial 30" in page
    assert "ridge" in page
    assert "trial 99" not in page


def test_the_error_over_time_goes_on_after_a_resume():
    ends = [
        slipstream.events.TrialEnd(trial=number, state="finished", value=9.0, params={}, at_s=at_s)
        for number, at_s in ((0, 5.0), (1, 8.0), (2, 3.0))  # the last one after a resume
    ]
    page = draw_progress(ends, [make_row(number) for number in range(3)], "scaled MSE")
    assert ">10<" in page  # 8 s and 3 s make 11 s
    assert draw_progress([], [], "scaled MSE") is None


def test_equal_errors_are_not_a_gain(study):
    result = copy.deepcopy(dict(study.summary))
    own = result["metrics"]["test"]["mae"]
    result["baselines"] = {"ridge": {"metrics": {"test": {"mae": own * 1.001}}}}
    result["members"] = []
    assert ", as ridge (" in describe_auto(result, ["a"])
    result["baselines"] = {"ridge": {"metrics": {"test": {"mae": own * 2}}}}
    assert ", 50 % below ridge (" in describe_auto(result, ["a"])


def test_the_verdict_is_one_sentence_in_the_units_of_the_target():
    def score(mae):
        return {"metrics": {"test": {"mae": mae}}}

    members = [score(2.6) | {"weight": 0.5}, score(2.441) | {"weight": 0.5}]
    result = score(2.314) | {
        "baselines": {"gbm": score(2.788), "ridge": score(3.0), "seasonal": None},
        "data": {"columns": {"load": {"unit": "MW"}}},
        "members": members,
    }
    assert describe_auto(result, ["load"]) == (
        "2.314 MW mean absolute error on the test set, 17 % below gradient boosting (2.788), the "
        "best single model 2.441."
    )
    alone = {key: value for key, value in result.items() if key not in ("members", "data")}
    assert describe_auto(alone, ["load"]) == (
        "2.314 mean absolute error on the test set, 17 % below gradient boosting (2.788)."
    )


def test_the_verdict_on_series_of_many_sizes_is_relative():
    """An absolute error is that of the largest series, which a worse model may predict better."""

    def score(mae, mase):
        return {"metrics": {"test": {"mae": mae, "mase": mase}}}

    result = score(299.0, 0.84) | {"baselines": {"ridge": score(247.0, 1.0)}, "members": []}
    assert describe_auto(result, ["load"], by_series=True) == (
        "0.8400 mean absolute scaled error on the test set, 16 % below ridge (1.000)."
    )


def test_what_candidates_cost_is_shown_where_there_is_room(study):
    assert study.summary["leaderboard"][0]["predict_us"] > 0
    assert any(row["flash_bytes"] for row in study.summary["leaderboard"])
    wide = print_at(study, 190)
    (heading,) = [line for line in wide if "validation" in line and "┃" in line]
    assert all(name in heading for name in ("parameters", "µs", "C flash", "C RAM", "settings"))
    page = read(slipstream.report(study.run))
    largest = max(row["flash_bytes"] or 0 for row in study.summary["leaderboard"])
    assert f"{largest:,}" in page


def test_models_of_one_candidate_are_summed_up():
    members = [
        {"name": "trial 7", "kind": "gru", "weight": 0.25},
        {"name": "trial 7", "kind": "gru", "weight": 0.25},
        {"name": "gbm", "kind": "gbm", "weight": 0.5},
    ]
    (line,) = describe_members({"members": members, "folds": None, "coverage": None})
    assert line.endswith("0.500 trial 7 (gru, 2 seeds), 0.500 gbm (gbm)")
    assert not was_trained({"members": members})
