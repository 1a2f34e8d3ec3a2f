"""Names are text: what stands in square brackets, between colons or behind a backslash is printed
as it is, and what a terminal would obey is printed as an escape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.test_cli import invoke, sets
from tests.conftest import waves
from tests.labelled import NAMES, states

ODD = {
    "power [kW]": "power [kW]",
    "flow [/min]": "flow [/min]",
    "[bold]": "[bold]",
    "a [link=x] b": "a [link=x] b",
    ":warning:": ":warning:",
    "C:\\[x\\]": "C:\\[x\\]",
    "$\\frac_$": "$\\frac_$",
    "two\nlines": "two\\nlines",
    "\x1b[31mred\x07": "\\x1b[31mred\\x07",
    "nul\x00\x9b\u202e": "nul\\x00\\x9b\\u202e",
}
"""Names, and what is printed of them"""
TABLE = "table [kW]\n[bold].parquet"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")
"""What must not reach a terminal"""


def checked(*arguments):
    found = invoke(*arguments)
    assert found.exit_code == 0, found.output
    assert not RAW.search(found.output), found.output
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with square brackets, whose files have them too."""
    made = tmp_path_factory.mktemp("odd") / "in [/here] :warning:"
    made.mkdir(parents=True)  # "[/here]" is two folders, and a closing tag to rich
    return made


@pytest.fixture(scope="module")
def job(folder):
    """A config whose table has a column of every odd name."""
    table = waves(200, columns=len(ODD) - 2)
    columns = [*table.columns[1:], table.column(1), table.column(2)]
    named = {"time": table.column("time")} | dict(zip(ODD, columns, strict=True))
    pq.write_table(pa.table(named), folder / TABLE)
    config = folder / "job [link=x].toml"
    path = json.dumps(str(folder / TABLE))
    out = json.dumps(str(folder / "runs [kW]"))
    config.write_text(f"out = {out}\n[data]\npath = {path}\n")
    return config


@pytest.fixture(scope="module")
def trained(job):
    found = checked("train", job, *sets())
    (run,) = (job.parent / "runs [kW]").iterdir()
    return found, run


def test_a_training_prints_its_folders(trained):
    found, run = trained
    assert f"run: {run}" in found.stdout
    assert f"report: {run}/report.html" in found.stdout


def test_an_evaluation_prints_every_name(trained):
    found = checked("evaluate", trained[1])
    for name in ODD.values():
        assert f" {name} " in found.stdout


def test_json_is_one_ascii_line_with_every_name(trained):
    found = checked("evaluate", trained[1], "--json")
    assert found.stdout.isascii()
    assert found.stdout.count("\n") == 1
    assert set(json.loads(found.stdout)["detail"]["per_target"]) == set(ODD)


def test_a_prediction_prints_where_it_is(trained, folder):
    out = folder / "ahead [x].csv"
    found = checked("predict", trained[1], folder / TABLE, "--out", out)
    assert f"written to {out}" in found.stdout


def test_an_error_prints_its_names(job):
    found = invoke("train", job, *sets('data.targets=["\\u001b[2J[/x]"]'))
    assert found.exit_code == 2
    assert "\\x1b[2J[/x]" in found.stderr
    assert "power [kW], flow [/min]" in found.stderr
    assert not RAW.search(found.stderr)


def test_classes_are_printed_by_their_names(folder):
    table = states(600)
    names = dict(zip(NAMES, ("[/calm]", "fast [bold]", "wild\x1b[2J"), strict=True))
    labels = pa.array([names[one.as_py()] for one in table.column("state")])
    path = folder / "states [kW].parquet"
    pq.write_table(table.drop_columns("state").append_column("state [/x]", labels), path)
    more = ("data.task=classify", 'data.targets=["state [/x]"]', "data.horizon=0")
    where = (f"data.path={json.dumps(str(path))}", f"out={json.dumps(str(folder / 'classes'))}")
    (folder / "classes.toml").write_text("")
    run = json.loads(
        checked("train", folder / "classes.toml", "--json", *sets(*more, *where)).stdout
    )["run"]
    found = checked("evaluate", run)
    for name in ("[/calm]", "fast [bold]", "wild\\x1b[2J"):
        assert f" {name} " in found.stdout


def test_a_search_prints_its_names(job):
    more = ("tune.trials=2", "tune.retrain=1", "tune.retrain_seeds=2")
    space = 'tune.space={"model.normalize"=["none","last"]}'
    found = checked("tune", job, *sets(*more, space))
    (run,) = (path for path in (job.parent / "runs [kW]").iterdir() if "study.log" in listed(path))
    assert f"model: {run}/retrained/best" in found.stdout
    assert f"testing {run}/retrained/best" in found.stderr


def listed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_bench_prints_its_folder(job):
    out = job.parent / "bench [/x]"
    found = checked("bench", "ladder", job, *sets(), "--minutes", "0.05", "--out", out)
    assert f"results: {out}" in found.stdout
