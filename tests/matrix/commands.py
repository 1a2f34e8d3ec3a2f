"""The commands that every kind of run is given to: one entry of `COMMANDS` each, for the command
line and for Python.

An entry gets a `Cell`, calls the command and checks more than that it ends: finite numbers, the
number of rows, and equality with what another command gives. A command that refuses a run raises
`Refusal`; `tests.matrix.refusals` lists where that is right.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream import runs
from slipstream.app.app import create_app
from slipstream.app.security import Access
from slipstream.app.workspace import Workspace
from slipstream.cli.commands import app
from slipstream.server.api import build_app
from slipstream.tools.doctor.trials import examine_job
from tests.conftest import close
from tests.matrix.kinds import CONTEXT, Trained
from tests.reporting.tracking.reading import read_scalars
from tests.validation import find_log_problems

TOKEN = "a-token-of-the-tests"


class Refusal(Exception):
    """A command does not take this kind of run, and says why."""


@dataclass(frozen=True)
class Cell:
    """One command on one kind of run."""

    kind: str
    trained: Trained
    folder: Path
    """Empty, for what the command writes"""

    @property
    def run(self) -> Path:
        return self.trained.run

    def copy(self) -> Cell:
        """Return the cell with a run that the command may change."""
        return Cell(self.kind, self.trained.copy(self.folder / "copied"), self.folder)


Call = Callable[[Cell], None]


class Command(NamedTuple):
    """A command, or a function of the package, with its main options."""

    call: Call
    only: Collection[str] = ()
    """The kinds that it is tried on, where all would take too long; empty for all"""
    returns: Collection[str] = ()
    """The public classes that come back"""


COMMANDS: dict[str, Command] = {}
"""By name, which begins with the command's, or the function's"""
VARIED = (
    *("lstm", "tcn at a row", "classes", "quantiles"),
    *("channels", "future", "streamed", "carried"),
)
"""Kinds that differ in what a training step does, for commands that time it"""


def command(
    name: str, *, only: Collection[str] = (), returns: Collection[str] = ()
) -> Callable[[Call], Call]:
    """Add a function to the matrix."""

    def add(function: Call) -> Call:
        COMMANDS[name] = Command(function, only, returns)
        return function

    return add


def cli(*arguments: Any, text: bool = False) -> Any:
    """Call a command in this process; return its JSON, or what it prints for people."""
    words = [str(one) for one in arguments]
    found = CliRunner().invoke(app, words if text else [*words, "--json"])
    if found.exit_code == 2 and "internal error" not in found.output:
        assert "Traceback" not in found.output, found.output
        raise Refusal(found.stderr)
    assert found.exit_code == 0, f"exit {found.exit_code}: {found.output}"
    return found.stdout if text else json.loads(found.stdout)


def python(name: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the package."""
    try:
        return getattr(slipstream, name)(*arguments, **options)
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None


def check_finite(value: Any, where: str = "") -> None:
    """Every number in an object is finite."""
    if isinstance(value, dict):
        for name, one in value.items():
            check_finite(one, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            check_finite(one, f"{where}[{number}]")
    elif isinstance(value, float):
        assert math.isfinite(value), where


def read_metrics(cell: Cell) -> dict[str, Any]:
    """What training wrote of the run's model; empty where it was never tested, as of a run that was
    stopped."""
    folder = find_model(cell)
    return runs.read_metrics(folder) if (folder / "metrics.json").exists() else {}


def find_model(cell: Cell) -> Path:
    """The folder of the run's model, which is inside that of a search."""
    model, _ = runs.find_model_run(runs.open_run(cell.run))
    return model.folder


def check_same_metrics(cell: Cell, scores: dict[str, Any], which: str = "test") -> None:
    """What evaluate computes is what training wrote, of the model or of the ensemble."""
    check_finite(scores["metrics"])
    saved = read_metrics(cell)
    if not saved:
        return
    every = [saved, saved.get("ensemble") or {}, *saved.get("members", [])]
    candidates = [one.get("metrics", {}).get(which) for one in every]
    assert any(one is not None and _are_close(scores["metrics"], one) for one in candidates), (
        f"{scores['metrics']} is none of {candidates}"
    )
    assert scores["windows"] == saved["windows"][which]


def _are_close(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(
        one.get(name) == value or math.isclose(one[name], value, rel_tol=1e-4, abs_tol=1e-6)
        for name, value in other.items()
    )


def check_predictions(cell: Cell, table: pa.Table, *, every: bool = False) -> None:
    """A table of predictions has the rows it should have, and finite numbers."""
    config = cell.trained.config
    for name in table.column_names:
        if pa.types.is_floating(table.schema.field(name).type) and name != config.data.time_column:
            assert np.isfinite(table[name].to_numpy()).all(), name
    series = len(table["series"].unique())
    assert series == (2 if config.data.ids else 1)
    if config.data.horizon and not every:
        assert table.num_rows == series * config.data.horizon
    else:
        assert table.num_rows > series


# ---- the command line: what is written for people and as JSON


@command("evaluate")
def evaluate(cell: Cell) -> None:
    check_same_metrics(cell, cli("evaluate", cell.run))


@command("evaluate (text)")
def evaluate_text(cell: Cell) -> None:
    assert "nan" not in cli("evaluate", cell.run, text=True).lower().split()


@command("evaluate --on val")
def evaluate_val(cell: Cell) -> None:
    check_same_metrics(cell, cli("evaluate", cell.run, "--on", "val"), "val")


@command("evaluate --data")
def evaluate_data(cell: Cell) -> None:
    scores = cli("evaluate", cell.run, "--data", cell.trained.source)
    check_finite(scores["metrics"])
    assert scores["windows"] > 0


@command("evaluate --single")
def evaluate_single(cell: Cell) -> None:
    check_same_metrics(cell, cli("evaluate", cell.run, "--single"))


@command("evaluate --predictions")
def evaluate_predictions(cell: Cell) -> None:
    file = cell.folder / "scored.parquet"
    scores = cli("evaluate", cell.run, "--predictions", file)
    config = cell.trained.config
    assert pq.read_metadata(file).num_rows == scores["windows"] * max(config.data.horizon, 1)


@command("evaluate --stream")
def evaluate_stream(cell: Cell) -> None:
    cell = cell.copy()  # it records what is better, and the run's users follow that
    scores = cli("evaluate", cell.run, "--stream")
    check_finite(scores["window"]["metrics"])
    check_finite(scores["carried"]["metrics"])


@command("evaluate --stream --out")
def evaluate_stream_page(cell: Cell) -> None:
    cell, page = cell.copy(), cell.folder / "page.html"
    text = cli("evaluate", cell.run, "--stream", "--out", page, text=True)
    assert text.strip()
    assert "</html>" in page.read_text(encoding="utf-8")


READERS = {".csv": pa.csv.read_csv, ".parquet": pq.read_table, ".arrow": pa.feather.read_table}


@command("predict")
def predict(cell: Cell) -> None:
    """All three formats hold the same."""
    tables = []
    for ending, read in READERS.items():
        file = cell.folder / f"predictions{ending}"
        result = cli("predict", cell.run, cell.trained.rows, "--out", file)
        tables.append(read(file))
        assert result["rows"] == tables[-1].num_rows
        assert result["columns"] == tables[-1].column_names
        check_predictions(cell, tables[-1])
    names = [name for name in tables[0].column_names if tables[0][name].type == pa.float64()]
    for name in names:
        close(tables[0][name].to_numpy(), tables[1][name].to_numpy(), rel=1e-7)  # float32 in digits
        assert tables[1][name].equals(tables[2][name])


@command("predict (text)")
def predict_text(cell: Cell) -> None:
    text = cli("predict", cell.run, cell.trained.rows, "--out", cell.folder / "a.csv", text=True)
    assert "a.csv" in text


SETTLED = 12
"""Last rows of a test set, to which a filter has forgotten where it started"""


@command("predict --every")
def predict_every(cell: Cell) -> None:
    """Of the run's own file, the predictions of the test set are those that training wrote."""
    file, config = cell.folder / "predictions.parquet", cell.trained.config
    single = ["--single"] if config.train.repeats > 1 else []  # training writes those of the best
    cli("predict", cell.run, cell.trained.source, "--out", file, "--every", *single)
    got = pq.read_table(file)
    check_predictions(cell, got, every=True)
    if not (find_model(cell) / "predictions.parquet").exists():
        return
    wanted = pq.read_table(find_model(cell) / "predictions.parquet")
    if config.predict.filter.kind != "none":  # it started anew with the test set
        late = np.partition(np.unique(wanted["row"].to_numpy()), -SETTLED)[-SETTLED]
        wanted = wanted.filter(pa.compute.greater_equal(wanted["row"], late))
    keys = [name for name in ("series", "row", "step") if name in wanted.column_names]
    if not config.data.ids:  # a table has another name than its file
        keys.remove("series")
    if "fold" in wanted.column_names:  # new data are predicted by the last one
        last = max(wanted["fold"].to_pylist())
        wanted = wanted.filter(pa.compute.equal(wanted["fold"], last))
    here = {key: number for number, key in enumerate(_list_keys(got, keys))}
    places = [here[key] for key in _list_keys(wanted, keys)]
    values = [name for name in wanted.column_names if "_predicted" in name or name[:2] == "p_"]
    assert values
    for name in values:
        close(got[name].to_numpy()[places], wanted[name].to_numpy(), rel=2e-5)


def _list_keys(table: pa.Table, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


@command("predict --single")
def predict_single(cell: Cell) -> None:
    file = cell.folder / "predictions.parquet"
    cli("predict", cell.run, cell.trained.rows, "--out", file, "--single")
    check_predictions(cell, pq.read_table(file))


def export(to: str) -> None:
    @command(f"export --to {to}")
    def export_run(cell: Cell) -> None:
        out = cell.folder / "export"
        result = cli("export", cell.run, "--to", to, "--out", out)
        assert result["parity"]["windows"] > 0
        assert result["parity"]["max_rel"] <= 1e-5
        assert all((out / one["name"]).is_file() for one in result["files"]) or result["files"]


for one in ("onnx", "c", "torch", "hub", "triton", "ray"):
    export(one)


@command("export --data")
def export_data(cell: Cell) -> None:
    out = cell.folder / "export"
    text = cli(
        *("export", cell.run, "--to", "hub", "--out", out, "--data", cell.trained.source), text=True
    )
    assert str(out) in text


@command("report")
def report(cell: Cell) -> None:
    result = cli("report", cell.run, "--out", cell.folder)
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert "</html>" in page
    assert ">nan<" not in page.lower()


@command("follow --to tensorboard")
def follow(cell: Cell) -> None:
    cell = cell.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "nice", raising=False)  # of all tests that follow
        result = cli("follow", cell.run, "--to", "tensorboard", "--out", cell.folder / "board")
    has_figures = (cell.run / "metrics.json").exists()
    assert result["finished"] == has_figures
    if cell.kind != "stopped search":  # which has no trial yet
        assert read_scalars(cell.folder / "board")
    check_finite([value for *_, value in read_scalars(cell.folder / "board")])


@command("copy")
def copy(cell: Cell) -> None:
    sent = cli("copy", cell.run, f"file://{cell.folder}/bucket")
    assert sent["files"] == sent["copied_files"] > 0
    back = cli("copy", sent["to"], cell.folder / "back")
    assert back["files"] == sent["files"]


@command("runs")
def list_(cell: Cell) -> None:
    (row,) = [one for one in cli("runs", cell.run.parent) if one["run"] == str(cell.run)]
    assert row["state"] in ("finished", "stopped")
    assert cell.run.name[:20] in cli("runs", cell.run.parent, text=True)


@command("runs show")
def show(cell: Cell) -> None:
    assert cli("runs", "show", cell.run)["run"] == str(cell.run)
    assert cell.run.name in cli("runs", "show", cell.run, text=True)


@command("runs compare")
def compare(cell: Cell) -> None:
    other = cell.copy().run
    page = cell.folder / "comparison.html"
    result = cli("runs", "compare", cell.run, other, "--html", page)
    assert len(result["runs"]) == 2
    assert "</html>" in page.read_text(encoding="utf-8")
    cli("runs", "compare", cell.run, other, "--html", page, text=True)


@command("runs best")
def best(cell: Cell) -> None:
    cell = cell.copy()
    result = cli("runs", "best", "--out", cell.run.parent)
    assert result["run"] == str(cell.run)
    check_finite(result["test"])


@command("runs remove")
def remove(cell: Cell) -> None:
    cell = cell.copy()
    result = cli("runs", "remove", cell.run, "--yes")
    assert [one["run"] for one in result["removed"]] == [str(cell.run)]
    assert not cell.run.exists()


@command("runs prune")
def prune(cell: Cell) -> None:
    cell = cell.copy()
    shutil.copytree(cell.run, cell.run.parent / "second")
    result = cli("runs", "prune", "--out", cell.run.parent, "--keep-best", "1", "--yes")
    assert len(result["removed"]) <= 1
    assert len(list(cell.run.parent.iterdir())) == 2 - len(result["removed"])


@command("inspect")
def inspect(cell: Cell) -> None:
    result = cli("inspect", cell.trained.rows, "--html", cell.folder / "page.html")
    assert result["columns"]
    assert "</html>" in (cell.folder / "page.html").read_text(encoding="utf-8")


@command("serve")
def serve(cell: Cell) -> None:
    """What it answers is what predict writes."""
    rows = pq.read_table(cell.trained.rows)
    try:
        server = build_app(cell.run)
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    headers = {"Content-Type": "application/vnd.apache.arrow.stream"}
    body = sink.getvalue().to_pybytes()
    predicted = _ask(server, "POST", "/predict", content=body, headers=headers)
    wanted = python("predict", cell.run, rows, quiet=True, allow_code=True)
    _compare_answer(predicted, wanted)
    _ask(server, "GET", "/schema")
    _ask(server, "GET", "/health")


@command("serve, a stream")
def serve_stream(cell: Cell) -> None:
    """Rows that are pushed over HTTP give what predict gives for all of them."""
    rows = pq.read_table(cell.trained.rows)
    if cell.trained.config.data.ids:  # a stream is one series
        rows = rows.filter(pa.compute.equal(rows["id"], "s0"))
    try:
        server = build_app(cell.run)
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None
    wanted = python("predict", cell.run, rows, quiet=True, allow_code=True)
    content = [
        {name: value for name, value in row.items() if value is not None}
        | ({"time": row["time"].isoformat()})
        for row in rows.to_pylist()
    ]
    headers = {"Content-Type": "application/json"}
    answer: Any = None
    for part in (content[: CONTEXT + 1], content[CONTEXT + 1 :]):
        answer = _ask(
            server,
            "POST",
            "/streams/one",
            content=json.dumps({"rows": part}).encode(),
            headers=headers,
        )
    _compare_answer(answer, wanted, last=True)


def _ask(server: Any, method: str, path: str, **options: Any) -> Any:
    """Send a request to an ASGI application; return the JSON of its answer."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=server, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **options)

    answer = asyncio.run(send())
    if answer.status_code == 422:
        raise Refusal(answer.json()["error"])
    assert answer.status_code == 200, answer.text
    return answer.json()


def _compare_answer(answer: Any, wanted: pa.Table, *, last: bool = False) -> None:
    """Numbers of an answer are those of a table of predictions, or of its last rows."""
    table = pa.Table.from_pylist(answer["predictions"])
    begin = wanted.num_rows - table.num_rows if last else 0
    assert table.num_rows > 0
    assert wanted.num_rows >= table.num_rows
    for name in wanted.column_names:
        if name != "time" and pa.types.is_floating(wanted.schema.field(name).type):
            close(table[name].to_pylist(), wanted[name].to_pylist()[begin:], rel=2e-5)


@command("ui")
def ui(cell: Cell) -> None:
    """Every page of the run opens."""
    workspace = Workspace(cell.run.parents[1].resolve(), warm=False)
    site = create_app(workspace, Access(TOKEN, 80))
    name = urllib.parse.quote(str(cell.run.relative_to(cell.run.parents[1])))
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "127.0.0.1:80"}
    for path in ("/", f"/run/{name}", f"/result/{name}", f"/compare?run={name}"):
        answer = _get(site, path, headers)
        assert answer.status_code in (200, 303, 307), (path, answer.text)
    for path in (f"/api/result/{name}", f"/api/plot/{name}", f"/report/{name}"):
        answer = _get(site, path, headers)
        assert answer.status_code in (200, 400, 404), (path, answer.text)


def _get(site: Any, path: str, headers: dict[str, str]) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=site, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


# ---- the command line: what trains


def settings(*names: str) -> list[str]:
    return [word for name in names for word in ("--set", name)]


@command("train --resume")
def resume(cell: Cell) -> None:
    """A run that was stopped ends; of a finished one, nothing is left."""
    cell = cell.copy()
    result = cli("train", "--resume", cell.run)
    check_finite(result["metrics"])
    assert result["run"] == str(cell.run)


@command("train --resume, longer")
def resume_longer(cell: Cell) -> None:
    cell = cell.copy()
    text = cli("train", "--resume", cell.run, *settings("train.epochs=6"), text=True)
    assert "report.html" in text


@command("train")
def train(cell: Cell) -> None:
    """The run's own config trains the same model again; that of a search or an ensemble is where
    they began."""
    out = cell.folder / "again"
    result = cli("train", cell.run / "config.toml", "--out", out)
    check_finite(result["metrics"])
    if runs.find_kind(cell.run) in ("train", "pretrain"):
        wanted = read_metrics(cell).get("metrics", {})
        assert all(_are_close(result["metrics"][name], wanted[name]) for name in wanted)


@command("train from it")
def train_from(cell: Cell) -> None:
    """A run that starts from this one, as from an encoder."""
    more = ("train.objective=predict", "data.horizon=2", "train.epochs=2", "train.freeze_epochs=1")
    result = cli(
        *("train", cell.run / "config.toml", "--out", cell.folder / "tuned"),
        *settings(*more, f"train.init_from={cell.run}"),
    )
    assert result["init_from"]


@command("pretrain")
def pretrain(cell: Cell) -> None:
    out = cell.folder / "encoder"
    more = ("pretrain.length=2", "train.epochs=1")
    if cell.kind == "refit":  # of a kind that auto chooses
        more += ("model.kind=gru", "model.patch=1", "model.normalize=none")
    result = cli("pretrain", cell.run / "config.toml", "--out", out, *settings(*more))
    check_finite(result["metrics"])


@command("pretrain --resume")
def pretrain_resume(cell: Cell) -> None:
    cell = cell.copy()
    check_finite(cli("pretrain", "--resume", cell.run)["metrics"])


@command("tune")
def tune(cell: Cell) -> None:
    out = cell.folder / "search"
    few = ("tune.trials=2", "tune.retrain=0", "train.epochs=1", "tune.minutes=60")
    space = 'tune.space={"train.lr"=[0.01, 0.02]}'
    result = cli("tune", cell.run / "config.toml", "--out", out, *settings(*few, space))
    assert sum(result["trials"].values()) == 2


@command("tune --resume")
def tune_resume(cell: Cell) -> None:
    cell = cell.copy()
    check_finite(cli("tune", "--resume", cell.run)["best"])


def run_alone(*words: Any) -> dict[str, Any]:
    """Run a command in a process of its own, whose time begins with it; return its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        raise Refusal(done.stderr)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


SEARCHED = (
    *("gru", "gru at a row", "classes", "quantiles", "future", "channels", "series"),
    *("carried", "repeats", "streamed", "walk-forward", "table", "pre-trained", "hub export"),
    *("missing targets", "prepared, repeats", "search", "search of auto"),
)
"""Kinds whose configs are given to `auto`, which takes a few seconds each"""


@command("auto", only=SEARCHED)
def auto(cell: Cell) -> None:
    """In so little time that hardly a candidate trains; the baselines are candidates as well."""
    config, out = cell.run / "config.toml", cell.folder / "auto"
    result = run_alone("auto", config, "--out", out, "--minutes", "0.1")
    check_finite(result["metrics"]["test"])
    assert result["leaderboard"]
    assert math.isclose(sum(member["weight"] for member in result["ensemble"]), 1.0)
    assert result["verdict"]


@command("auto --resume")
def auto_resume(cell: Cell) -> None:
    cell = cell.copy()
    result = run_alone("auto", "--resume", cell.run, "--minutes", "0.5")
    check_finite(result["metrics"]["test"])


@command("ensemble")
def ensemble(cell: Cell) -> None:
    other = cell.trained.copy(cell.folder / "other").run
    result = cli("ensemble", cell.run, other, "--out", cell.folder / "joint")
    check_finite(result["metrics"])
    check_finite(cli("evaluate", result["run"])["metrics"])


@command("train --advise", only=VARIED)
def train_advise(cell: Cell) -> None:
    cli("train", cell.run / "config.toml", "--out", cell.folder, "--advise", text=True)


@command("train --share", only=("repeats", "walk-forward", "gru", "table"))
def train_share(cell: Cell) -> None:
    """Shares train what one command trains."""
    folder = cell.folder / "shares"
    for number in (1, 2):
        cli("train", cell.run / "config.toml", "--folder", folder, "--share", f"{number}/2")
    result = cli("train", "--resume", folder)
    assert _are_close(result["metrics"]["test"], read_metrics(cell)["metrics"]["test"])


@command("pretrain --probe", only=("gru", "classes", "pre-trained", "table"))
def pretrain_probe(cell: Cell) -> None:
    config = cell.run / "config.toml"
    more = ("pretrain.length=2", "train.objective=masked", f"out={cell.folder}")
    labels = ("train.epochs=2", "train.freeze_epochs=1", f"out={cell.folder}")
    words = [word for one in labels for word in ("--probe-set", one)]
    result = cli("pretrain", config, "--probe", config, "--seeds", 2, *settings(*more), *words)
    assert set(result["ways"]) == {"scratch", "frozen", "fine-tuned"}


@command("profile", only=VARIED)
def profile(cell: Cell) -> None:
    result = cli("profile", cell.run / "config.toml", "--steps", 2, "--out", cell.folder)
    assert result["ms_per_step"] > 0


@command("doctor", only=VARIED)
def doctor(cell: Cell) -> None:
    """What `doctor JOB` does for the job; the machine itself is examined elsewhere."""
    try:
        found = examine_job(cell.run / "config.toml", lambda _: None)
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None
    assert found["windows"]["train"] > 0


@command("prepare", only=VARIED)
def prepare(cell: Cell) -> None:
    rows = cell.folder / "rows.parquet"
    result = cli("prepare", cell.run / "config.toml", "--out", rows)
    assert pq.read_metadata(rows).num_rows == result["rows"] > 0


@command("slipstream.prepare", only=VARIED)
def prepare_python(cell: Cell) -> None:
    rows = python("prepare", cell.run / "config.toml", cell.trained.table)
    assert rows.num_rows > 0


def bench(name: str, *options: Any) -> None:
    @command(f"bench {name}", only=VARIED)
    def measure(cell: Cell) -> None:
        out = cell.folder / "bench"
        config = cell.run / "config.toml"
        cli("bench", name, config, "--minutes", 0.05, "--out", out, *options)
        if name == "ladder":
            assert cli("bench", "compare", out, out, "--out", cell.folder / "compared")


bench("ladder")
bench("parity", "--seeds", 3)
bench("peers", "--no-jobs")


# ---- Python


@command("slipstream.evaluate", returns=["Evaluation"])
def evaluate_python(cell: Cell) -> None:
    scores = python("evaluate", cell.run, quiet=True, allow_code=True)
    assert isinstance(scores, slipstream.Evaluation)
    check_same_metrics(cell, scores)
    assert repr(scores)
    assert "<table" in scores._repr_html_()
    assert len(scores.to_pandas())


@command("slipstream.evaluate, new data", returns=["Evaluation"])
def evaluate_table(cell: Cell) -> None:
    table = pq.read_table(cell.trained.source)
    check_finite(python("evaluate", cell.run, table, quiet=True, allow_code=True).metrics)


@command("slipstream.evaluate, a stream", returns=["StreamEvaluation"])
def evaluate_stream_python(cell: Cell) -> None:
    cell = cell.copy()
    scores = python("evaluate", cell.run, stream=True, quiet=True, allow_code=True)
    assert isinstance(scores, slipstream.StreamEvaluation)
    check_finite(scores.metrics)
    assert repr(scores)
    assert scores.reason
    assert len(scores.to_pandas())


@command("slipstream.predict")
def predict_python(cell: Cell) -> None:
    """A table gives what its file gives."""
    options: dict[str, Any] = {"quiet": True, "allow_code": True}
    one = python("predict", cell.run, cell.trained.rows, **options)
    other = python("predict", cell.run, pq.read_table(cell.trained.rows), **options)
    check_predictions(cell, one)
    for name in one.column_names[1:]:
        assert one[name].equals(other[name])


@command("slipstream.export")
def export_python(cell: Cell) -> None:
    data = pq.read_table(cell.trained.source)
    options: dict[str, Any] = {"quiet": True, "allow_code": True, "data": data}
    result = python("export", cell.run, out=cell.folder / "export", **options)
    assert result["parity"]["windows"] > 0


@command("slipstream.report")
def report_python(cell: Cell) -> None:
    assert python("report", cell.run, out=cell.folder).is_file()


@command("slipstream.follow", only=VARIED)
def follow_python(cell: Cell) -> None:
    cell = cell.copy()
    out = str(cell.folder / "board")
    assert python("follow", cell.run, "tensorboard", out=out)["points"] > 0


@command("slipstream.inspect", returns=["Inspection"])
def inspect_python(cell: Cell) -> None:
    found = python("inspect", cell.trained.source)
    assert isinstance(found, slipstream.Inspection)
    assert repr(found)
    assert len(found.to_pandas())


@command("slipstream.list_runs", returns=["RunRow"])
def list_python(cell: Cell) -> None:
    rows = python("list_runs", cell.run.parent)
    (row,) = [one for one in rows if one.run == cell.run]
    assert isinstance(row, slipstream.RunRow)
    assert repr(rows)
    assert len(rows.to_pandas())


@command("slipstream.show_run")
def show_python(cell: Cell) -> None:
    assert python("show_run", cell.run)["run"] == str(cell.run)


@command("slipstream.compare_runs", returns=["Comparison"])
def compare_python(cell: Cell) -> None:
    found = python("compare_runs", cell.run, cell.copy().run)
    assert isinstance(found, slipstream.Comparison)
    assert repr(found)


@command("slipstream.best_run", returns=["RunRow"])
def best_python(cell: Cell) -> None:
    cell = cell.copy()
    assert python("best_run", cell.run.parent).run == cell.run


@command("slipstream.copy_run")
def copy_python(cell: Cell) -> None:
    assert python("copy_run", cell.run, f"file://{cell.folder}/bucket")["copied_files"] > 0


@command("slipstream.remove_runs")
def remove_python(cell: Cell) -> None:
    cell = cell.copy()
    python("remove_runs", cell.run)
    assert not cell.run.exists()


@command("slipstream.prune_runs")
def prune_python(cell: Cell) -> None:
    cell = cell.copy()
    assert len(python("prune_runs", cell.run.parent, keep_best=0, unfinished=True)) == 1


@command("slipstream.Result", returns=["Result"])
def open_result(cell: Cell) -> None:
    try:
        result = slipstream.Result.open(cell.run)
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None
    check_finite(result.metrics)
    assert repr(result)
    assert "<table" in result._repr_html_()
    assert result.verdict
    assert len(result.to_pandas())
    assert all(one.val_loss is not None for one in result.history)
    assert result.config


@command("slipstream.train", returns=["Result"])
def train_python(cell: Cell) -> None:
    """The run goes on in Python, with the table where it had one."""
    cell, data = cell.copy(), cell.trained.table
    longer = {"resume": cell.run, "overrides": {"train.epochs": 6}, "quiet": True}
    result = python("train", None, data, **longer, allow_code=True)
    assert isinstance(result, slipstream.Result)
    check_finite(result.metrics)


@command("slipstream.train_share", only=("repeats", "walk-forward", "gru", "table"))
def train_share_python(cell: Cell) -> None:
    config = cell.run / "config.toml"
    result = python("train_share", config, cell.folder / "shares", (1, 2), quiet=True)
    assert len(result["lanes"]) == 1


@command("slipstream.pretrain", returns=["Result"])
def pretrain_python(cell: Cell) -> None:
    cell, data = cell.copy(), cell.trained.table
    check_finite(python("pretrain", None, data, resume=cell.run, quiet=True).metrics)


@command("slipstream.tune", returns=["Study"])
def tune_python(cell: Cell) -> None:
    cell, data = cell.copy(), cell.trained.table
    study = python("tune", None, data, resume=cell.run, quiet=True)
    assert isinstance(study, slipstream.Study)
    assert repr(study)
    assert study.verdict
    assert len(study.to_pandas())


@command("slipstream.auto", returns=["Study"])
def auto_python(cell: Cell) -> None:
    cell, data = cell.copy(), cell.trained.table
    study = python("auto", None, data, resume=cell.run, quiet=True)
    assert study.verdict
    assert len(study.leaderboard)


@command("slipstream.probe", only=("gru", "classes", "pre-trained", "table"), returns=["Probe"])
def probe_python(cell: Cell) -> None:
    """Where the run is an encoder, with it."""
    config = cell.run / "config.toml"
    encoder: dict[str, Any] = {"overrides": {"out": str(cell.folder), "pretrain.length": 2}}
    labels = {"out": str(cell.folder), "train.epochs": 2, "train.freeze_epochs": 1}
    labels |= {"train.objective": "predict"}
    is_encoder = cell.trained.config.masked
    found = python(
        "probe",
        *(None if is_encoder else config, config, cell.trained.table),
        **(({"run": cell.run}) if is_encoder else encoder),
        label_overrides=labels,
        seeds=2,
        quiet=True,
    )
    assert isinstance(found, slipstream.Probe)
    assert found.verdict
    assert repr(found)
    assert len(found.to_pandas()) == 6


@command("slipstream.ensemble", returns=["Result"])
def ensemble_python(cell: Cell) -> None:
    other = cell.trained.copy(cell.folder / "other").run
    out, data = cell.folder / "joint", cell.trained.table
    joined = python("ensemble", [cell.run, other], data, out=out, quiet=True, allow_code=True)
    check_finite(joined.metrics)
    assert repr(joined)


@command("slipstream.event_schema")
def event_schema(cell: Cell) -> None:
    """Every event of the log is as the schema says."""
    assert python("event_schema")["$defs"]
    assert not list(find_log_problems(cell.run))


@command("slipstream.events")
def parse_events(cell: Cell) -> None:
    events = list(runs.read_events(runs.Run(cell.run)))
    assert not [event for event in events if isinstance(event, slipstream.events.Other)]


@command("slipstream.Config", returns=["Config"])
def read_config(cell: Cell) -> None:
    """A config is what its settings make."""
    config = cell.trained.config
    assert slipstream.Config(**config.model_dump(exclude_unset=True)) == config


@command("slipstream.load", returns=["TrainedModel"])
def load(cell: Cell) -> None:
    model = python("load", cell.run, allow_code=True, device="cpu")
    assert isinstance(model, slipstream.TrainedModel)
    assert model.context == CONTEXT or "auto" in cell.kind or cell.kind == "refit"  # auto chooses
    assert repr(model)
    try:
        table = model.predict(cell.trained.rows)
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None
    check_predictions(cell, table)


@command("slipstream.Forecaster", returns=["Forecaster"])
def forecaster(cell: Cell) -> None:
    """An estimator with the run's settings is fitted to a table, and predicts new rows."""
    config = cell.trained.config
    estimator = slipstream.Forecaster(config, out=str(cell.folder))
    try:
        estimator.fit(pq.read_table(cell.trained.source))
        values = estimator.predict(pq.read_table(cell.trained.rows))
    except slipstream.UserError as error:
        raise Refusal(str(error)) from None
    assert len(values)
    if config.data.task == "regress" and config.data.horizon:
        assert np.isfinite(values).all()


@command("slipstream.Stream", returns=["StreamPrediction"])
def stream(cell: Cell) -> None:
    """Rows that are pushed one by one give what predict gives for all of them."""
    rows = pq.read_table(cell.trained.rows)
    pushed = python("Stream", cell.run)
    config, last = cell.trained.config, None
    ahead = config.data.horizon if "p" in config.data.future else 0
    content = rows.to_pylist()
    if config.data.ids:
        content = [row for row in content if row["id"] == "s0"]
    known, later = content[: len(content) - ahead], content[len(content) - ahead :]
    # a row may complete none of the rows that they are resampled to
    resamples = any(step.step == "resample" for step in config.data.prepare)
    for row in known:
        future = {"p": [one["p"] for one in later]} if ahead else None
        try:
            answer = pushed.push(row, future=future, predict=resamples or row is known[-1])
            last = answer or last
        except slipstream.UserError as error:
            raise Refusal(str(error)) from None
    assert isinstance(last, slipstream.StreamPrediction)
    wanted = python("predict", cell.run, rows, quiet=True, allow_code=True)
    first = wanted["series"][0].as_py()
    wanted = wanted.filter(pa.compute.equal(wanted["series"].cast(pa.string()), first))
    for name, values in last.to_dict().items():
        expected = wanted[name].to_pylist()[-len(values) :]
        if isinstance(values[0], float):
            close(values, expected, rel=2e-5)
        else:
            assert values == expected
