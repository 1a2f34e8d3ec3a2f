"""`slipstream runs` and its commands."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slipstream import runs
from slipstream.cli.commands import app
from tests.cli.test_cli import invoke


def ask(answer, *words):
    return CliRunner().invoke(app, ["runs", *words], input=answer)


@pytest.mark.parametrize("words", [[], ["list"], ["runs"], ["--out", "runs"]])
def test_runs_lists_the_runs(out, words):
    answer = invoke("runs", *words)
    assert answer.exit_code == 0, answer.output
    heading, three, one = answer.stdout.splitlines()
    assert heading.split() == [
        "name",
        "age",
        "kind",
        "data",
        "test",
        "MAE",
        "vs.",
        "baseline",
        "state",
    ]
    assert three.startswith("three-20260102T000000Z")
    assert "train mlp" in one
    assert one.rstrip().endswith("finished")
    rows = json.loads(invoke("runs", *words, "--json").stdout)
    assert [row["name"] for row in rows] == [path.name for path in sorted(out.iterdir())[::-1]]
    assert {"run", "name", "state", "kind", "test", "baseline", "at"} <= rows[0].keys()


def test_the_list_is_sorted_and_filtered_by_options(out):
    (out / "one-20260101T000000Z" / "config.toml").unlink()
    rows = json.loads(invoke("runs", "--sort", "name", "--json").stdout)
    assert [row["state"] for row in rows] == ["damaged", "finished"]
    answer = invoke("runs", "--state", "damaged", "--name", "on*")
    assert "one-20260101T000000Z: damaged: config.toml is missing" in answer.stdout
    assert "three" not in answer.stdout
    assert invoke("runs", "--state", "lost").exit_code == 2
    assert "mae, rmse" in invoke("runs", "--metric", "mea").stderr


def test_a_misspelt_command_lists_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = invoke("runs", "shwo")
    assert answer.exit_code == 2
    assert "the commands are list, show, compare, best, remove and prune" in answer.stderr
    assert invoke("runs").stdout == "no runs in runs\n"
    for command in ("show", "compare", "best", "remove", "prune"):
        assert command in invoke("runs", "--help").stdout


@pytest.mark.usefixtures("out")
def test_show_prints_what_a_run_is_and_what_comes_next():
    answer = invoke("runs", "show", "three")
    assert answer.exit_code == 0, answer.output
    for part in (
        "train, finished",
        "linear, 3 repeats",
        "table.csv: a +4",
        "train.repeats",
        "DATA",
    ):
        assert part in answer.stdout
    assert json.loads(invoke("runs", "show", "last", "--json").stdout)["settings"]


def test_compare_writes_a_page_beside_the_runs(out):
    answer = invoke("runs", "compare", "one", "three")
    assert answer.exit_code == 0, answer.output
    assert "model.kind" in answer.stdout
    assert "curves: runs/comparison.html" in answer.stdout
    assert (out / "comparison.html").exists()
    page = out.parent / "page.html"
    result = json.loads(invoke("runs", "compare", "one", "last", "--html", page, "--json").stdout)
    assert result["html"] == str(page)
    assert page.exists()
    assert {row["setting"] for row in result["settings"]} >= {"model.kind", "train.repeats"}


@pytest.mark.usefixtures("out")
def test_best_prints_the_run_with_the_lowest_error():
    rows = json.loads(invoke("runs", "--metric", "rmse", "--json").stdout)
    best = json.loads(invoke("runs", "best", "--metric", "rmse", "--json").stdout)
    assert best["test"] == min(row["test"] for row in rows)
    assert best["name"] in invoke("runs", "best", "--metric", "rmse").stdout


def test_removing_asks_first(out):
    for answer in ("n\n", ""):
        result = ask(answer, "remove", "one")
        assert "remove 1 run (" in result.stderr
        assert len(list(out.iterdir())) == 2
    assert result.exit_code == 2
    assert "pass --yes" in result.stderr
    assert ask("n\n", "remove", "one").stdout == "removed nothing\n"
    assert ask("y\n", "remove", "one").stdout.startswith("removed 1 run (")
    assert [path.name for path in out.iterdir()] == ["three-20260102T000000Z"]


def test_yes_skips_the_question_and_a_locked_run_stays(out):
    (folder,) = out.glob("one-*")
    with runs.lock_run(runs.Run(folder)):
        refused = invoke("runs", "remove", "three", "one", "--yes")
        assert refused.exit_code == 2
        assert "nothing was removed" in refused.stderr
        pruned = invoke("runs", "prune", "--keep-best", 0, "--yes", "--json")
    result = json.loads(pruned.stdout)
    assert [row["name"] for row in result["removed"]] == ["three-20260102T000000Z"]
    assert result["bytes"] > 0
    assert list(out.iterdir()) == [folder]
    assert invoke("runs", "prune").stdout == "removed nothing\n"
