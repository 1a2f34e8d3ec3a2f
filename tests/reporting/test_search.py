"""What a user sees of a search: the terminal, the JSON, the report, and the model it left."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import slipstream
from slipstream import UserError, runs
from slipstream.base.text import format_number
from slipstream.events import Log, TrialEnd
from slipstream.reporting.terminal.progress import SearchDisplay
from slipstream.reporting.terminal.results import print_search
from slipstream.reporting.wording import (
    describe_search,
    describe_search_verdict,
    get_chosen,
    shorten_names,
)
from tests.cli.test_cli import invoke, sets
from tests.conftest import close, small_config, waves

SPACE = """
[tune.space]
"train.lr" = { low = 1e-4, high = 0.1, log = true }
"model.hidden" = [4, 8]
"model.dropout" = { low = 0.0, high = 0.4 }
"""
TRIALS = 5


class Page(HTMLParser):
    """Collects ids, references, tags and the cells of the table of trials."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.tags, self.rows = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        known = dict(attributes)
        self.ids += [known["id"]] if "id" in known else []
        self.links += [known[name] for name in ("src", "href", "xlink:href") if name in known]
        if tag == "tbody":
            self.rows = [[]]
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, text):
        if self.rows and text.strip():
            self.rows[-1].append(text.strip())


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search by the command line, what it printed and its folder."""
    folder = tmp_path_factory.mktemp("search")
    waves().to_pandas().to_csv(folder / "table.csv", index=False)
    job = folder / "job.toml"
    job.write_text(f'out = "{folder}/runs"\n[data]\npath = "table.csv"\n{SPACE}')
    more = [f"tune.trials={TRIALS}", "tune.retrain=1", "tune.retrain_seeds=2"]
    found = invoke("tune", job, "--json", *sets(*more))
    assert found.exit_code == 0, found.output
    return found, Path(json.loads(found.stdout)["run"])


@pytest.fixture(scope="module")
def untested(tmp_path_factory):
    """A search without retraining, by folds, some of whose trials cannot be trained."""
    space = {"model.kind": ["mlp", "transformer"], "train.lr": [0.01, 0.001]}
    tune = {"trials": 6, "retrain": 0, "folds": 2, "sampler": "random", "space": space}
    out = tmp_path_factory.mktemp("untested")
    config = small_config(out, model={"kind": "mlp", "hidden": 6, "heads": 4}, tune=tune)
    return slipstream.tune(config, waves())


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def test_json_is_one_strict_object(searched):
    found, run = searched
    assert found.stdout.count("\n") == 1
    summary = json.loads(found.stdout, parse_constant=refuse)
    assert summary["trials"] == {"finished": TRIALS, "pruned": 0, "failed": 0}
    assert summary["report"] == str(run / "report.html")
    assert list(summary["space"]) == list(summary["best"]["params"])
    assert summary["retrained"][0]["params"].keys() == summary["space"].keys()
    assert summary["comparison"]["verdict"] in ("better", "worse", "no difference shown")


def test_without_a_terminal_there_is_a_line_per_trial(searched):
    found, run = searched
    lines = found.stderr.splitlines()
    assert "search on cpu: 5 trials" in found.stderr
    told = [line for line in lines if re.match(r"\d of 5: trial \d: [\d.]+ after 2 epochs", line)]
    assert [line[0] for line in told] == list("12345")
    assert all(name in told[0] for name in ("lr 0.0", "hidden ", "dropout "))
    assert any(line.startswith("pack 1: trial") for line in lines)
    assert "searched for" in found.stderr
    assert sum(line.startswith("the defaults, seed 100") for line in lines) == 2
    assert f"testing {run}/retrained/best: 2 retrained models" in found.stderr
    assert "\x1b" not in found.output


def test_a_terminal_gets_a_table_that_goes_away(searched):
    _, run = searched
    display, out = SearchDisplay(quiet=False), io.StringIO()
    display.console = Console(file=out, force_terminal=True, width=120, highlight=False)
    with display:
        for event in runs.read_events(runs.open_run(run)):
            display.last_draw = 0.0
            display.show(event)
            if isinstance(event, TrialEnd) and display.progress.num_ended == 3:
                display.last_draw = 0.0
                display.show(Log(step=5, losses={3: 0.2, 4: 0.3}))
                at_three = out.getvalue()
    assert "3 of 5 done: 3 finished, 0 pruned, 0 failed" in at_three
    assert re.search(r"[\d,]+ trials an hour, ~\d+\.\d s left", at_three)
    assert "2 lanes in pack 1" in at_three
    assert "4 of 5: trial" not in out.getvalue()
    assert display.live is None


def test_quiet_is_quiet(searched, capfd):
    _, run = searched
    with SearchDisplay(quiet=True) as display:
        for folder in (run, run / "retrained" / "best"):
            for event in runs.read_events(runs.open_run(folder)):
                display.show(event)
    assert capfd.readouterr() == ("", "")


def test_a_resumed_search_counts_what_was_done(searched):
    _, run = searched
    first, *rest = runs.read_events(runs.open_run(run))
    display = SearchDisplay(quiet=False)
    display.console = Console(file=io.StringIO(), width=120)
    display.show(replace(first, is_resumed=True, done=2, trials=7))
    for event in rest[:4]:
        display.show(event)
    said = display.console.file.getvalue()
    assert "7 trials, 2 of them done" in said
    assert "3 of 7: trial" in said


def shown(summary):
    out = io.StringIO()
    print_search(summary, Console(file=out, width=120, highlight=False, soft_wrap=True))
    return out.getvalue()


def test_a_person_gets_settings_figures_and_a_verdict(searched):
    found, run = searched
    told = shown(json.loads(found.stdout))
    for part in ("train.lr", "0.0001 to 0.1, log", "4, 8", "default", "ridge", "MAE", "±"):
        assert part in told
    assert "Optuna took" in told
    assert f"slipstream train {run}/best.toml" in told
    assert f"model: {run}/retrained/best" in told
    assert f"run: {run}\n" in told
    assert describe_search_verdict(json.loads(found.stdout)) in told


@pytest.mark.parametrize(
    ("verdict", "low", "high", "beaten", "said"),
    [
        (
            "better",
            14.3,
            40.2,
            [],
            "Better than the defaults: test MSE 34.50 → 7.200, -79 % (95 % ",
        ),
        ("no difference shown", -3.0, 40.2, [], "within seed noise (95 % interval of"),
        ("worse", -9.0, -1.0, ["ridge"], "Keep the defaults. It still loses to ridge."),
    ],
)
def test_the_verdict_says_when_nothing_is_shown(searched, verdict, low, high, beaten, said):
    summary = json.loads(searched[0].stdout)
    summary["test"]["best"]["beaten_by"] = beaten
    summary["comparison"] = {
        "metric": "mse",
        "default": {"mean": 34.5, "n": 3},
        "chosen": {"mean": 7.2, "n": 3},
        "gain_percent": 79.1,
        "low": low,
        "high": high,
        "level": 0.95,
        "verdict": verdict,
    }
    assert said in describe_search_verdict(summary)


def test_the_report_is_one_page_beside_those_of_its_models(searched):
    _, run = searched
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    models = [f"retrained/{name}/report.html" for name in ("best", "default")]
    assert {link for link in page.links if not link.startswith("#")} == set(models)
    assert all((run / path).exists() for path in models)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert page.tags.count("svg") == 8
    for part in (
        "Retrained",
        "On the test set",
        "Learning curves",
        "Which settings matter",
        "Score over each setting",
        "From settings to score",
        "0 of 5 trials pruned (0 %)",
        f"optuna-dashboard {run}/study.log",
    ):
        assert part in text
    assert (run / "best.toml").read_text(encoding="utf-8") in html.unescape(text)
    spread = runs.read_json(run / "metrics.json")["test"]["best"]["scaled_spread"]["mse"]
    assert f"{format_number(spread['mean'])} ± {format_number(spread['sd'], figures=2)}" in text
    trials = sorted(runs.read_json(run / "trials.json"), key=lambda one: one["value"])
    listed = [row for row in page.rows if "finished" in row]
    assert [row[0] for row in listed] == [str(one["trial"]) for one in trials]


def test_a_report_holds_hundreds_of_trials_in_every_state(searched, tmp_path):
    run = tmp_path / "many"
    shutil.copytree(searched[1], run)
    shutil.rmtree(run / "retrained")
    (run / "manifest.json").unlink()  # of trials.json as it was
    first = runs.read_json(run / "trials.json")
    trials = []
    for trial in range(300):
        one = first[trial % TRIALS] | {"trial": trial}
        if trial >= TRIALS and trial % 3 == 1:
            one |= {"state": "pruned", "losses": {"1": 3.0}, "value": 3.0, "epochs": 1.0}
        elif trial >= TRIALS and trial % 3 == 2:
            one = {key: one[key] for key in ("trial", "params")}
            one |= {"state": "failed", "value": None, "losses": {}, "stopped": "<b>6 by 4</b>"}
        trials.append(one)
    runs.write_json(run / "trials.json", trials)
    text = slipstream.report(run).read_text(encoding="utf-8")
    page = Page(text)
    states = [row[1] for row in page.rows if len(row) > 5 and row[0].isdecimal()]
    assert len(states) == 300
    assert states == sorted(states, key=lambda state: state != "finished")
    assert states.count("failed") == 99
    assert "&lt;b&gt;6 by 4" in text
    assert "failed (99)" in text


def test_a_search_predicts_with_its_best_settings(searched, tmp_path):
    _, run = searched
    table = slipstream.predict(run, waves())
    again = slipstream.predict(run / "retrained" / "best", waves())
    assert table.equals(again)
    assert b"the search's best settings, retrained" in table.schema.metadata[b"model"]
    scores = slipstream.evaluate(run)
    assert scores["model"].startswith("the search's best settings, retrained: ")
    tested = runs.read_json(run / "retrained" / "best" / "metrics.json")
    mine = [tested["metrics"]["test"]["mae"], tested["ensemble"]["metrics"]["test"]["mae"]]
    close(scores["metrics"]["mae"], mine[tested["uses"] == "ensemble"])
    found = invoke("predict", run, run.parents[1] / "table.csv", "--out", tmp_path / "ahead.csv")
    assert found.exit_code == 0, found.output
    assert "predicted by the search's best settings, retrained" in found.stdout


def test_a_search_that_was_broken_off_predicts_with_its_best_trial(searched, tmp_path):
    run = tmp_path / "broken"
    shutil.copytree(searched[1], run)
    shutil.rmtree(run / "retrained")
    for name in ("trials.json", "metrics.json", "best.toml", "manifest.json"):
        (run / name).unlink()
    with pytest.raises(UserError, match="was the run finished"):
        slipstream.report(run)
    table = slipstream.predict(run, waves())
    assert table.schema.metadata[b"model"] == b"the search's best trial: the model"
    alone = tmp_path / "alone"
    shutil.copytree(run / "best", alone)
    assert slipstream.predict(alone, waves()).equals(table)


def test_a_search_without_retraining_promises_nothing(untested):
    text = slipstream.report(untested.run).read_text(encoding="utf-8")
    assert "the test set was not used" in text
    assert "Retrained" not in text
    assert "On the test set" not in text
    assert "2 folds" in text
    states = [row[1] for row in Page(text).rows if len(row) > 4 and row[0].isdecimal()]
    counts = untested.summary["trials"]
    assert states == ["finished"] * counts["finished"] + ["failed"] * counts["failed"]
    assert min(counts["finished"], counts["failed"]) > 0
    assert len(states) == 6
    assert "is not a multiple of" in text
    told = shown(untested.summary | {"report": "report.html"})
    assert "the test set was not used" in told
    assert f"model: {untested.run}/best" in told
    found = slipstream.evaluate(untested.run, waves())
    assert found["model"] == "the search's best trial: the model"


def test_a_lucky_trial_is_told_of(searched):
    summary = json.loads(searched[0].stdout)
    assert not any("lower mean" in line for line in describe_search(summary))
    lucky = summary | {"best": summary["best"] | {"trial": 99, "value": 0.5}}
    assert "trial 99 had the lowest score (0.5000)" in list(describe_search(lucky))[-1]
    assert get_chosen(lucky)["trial"] == summary["best"]["trial"]


def test_names_are_short_where_that_is_clear():
    names = ["train.lr", "model.hidden.0", "train.schedule", "data.schedule", "seed"]
    found = shorten_names(names)
    assert list(found.values()) == ["lr", "hidden.0", "train.schedule", "data.schedule", "seed"]
