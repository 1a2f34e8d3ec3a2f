"""The kinds of run that every command is tried on: one line each in `KINDS`.

A kind is trained once, on a table that has a column for every role. `train_kind` returns the run
with the rows to predict; nothing of it is changed afterwards: a command that writes into a run gets
a copy.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import slipstream
from slipstream import config as configs
from slipstream import runs
from slipstream.config.model import SPECS
from slipstream.events import Epoch, TrialEnd
from tests.conftest import merged
from tests.fitted import build_run

CONTEXT, HORIZON = 8, 3
START = np.datetime64("2026-01-05T00:00:00", "us")
SMALL: dict[str, Any] = {
    "data": {
        "time": "time",
        "inputs": ["a", "b"],
        "targets": ["c"],
        "context": CONTEXT,
        "horizon": HORIZON,
        "period": 12,
    },
    "model": {"kind": "gru", "hidden": 4, "layers": 1, "heads": 2, "dropout": 0.0},
    "train": {"batch": 32, "epochs": 1, "lr": 0.01},
    "engine": {"device": "cpu", "threads": 1, "plan": "off", "monitor": False},
}
"""Settings of every kind; a model that trains in a fraction of a second"""


def make_rows(num_rows: int, *, seed: int = 0, series: int = 1) -> pa.Table:
    """Return a table with numbers a, b and c, a plan p that is known ahead, a constant k per
    series, and a state with three classes."""
    draw = np.random.default_rng(seed)
    tables = []
    for number in range(series):
        rows = np.arange(num_rows)
        state = (rows // 7 + number) % 3
        plan = np.sin(2 * np.pi * rows / 12)
        wave = np.array([0.5, 1.0, 2.0])[state] * np.sin(rows * 0.7) + number
        noise = 0.1 * draw.standard_normal((3, num_rows))
        columns = {
            "time": START + rows * np.timedelta64(1, "h"),
            "a": 10 + wave + noise[0],
            "b": 5 * np.cos(rows / 5) + noise[1],
            "c": 20 + plan + 0.5 * wave + noise[2],
            "p": plan,
            "k": np.full(num_rows, 0.5 + number),
            "id": np.full(num_rows, f"s{number}"),
            "state": np.array(["calm", "fast", "wild"])[state],
        }
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)


@dataclass(frozen=True)
class Trained:
    """A run of some kind, and what commands are given beside it."""

    run: Path
    rows: Path
    """New rows to predict"""
    source: Path
    """The file that it was trained on"""
    table: pa.Table | None = None
    """The table that it was trained on, if that was not a file"""

    @property
    def config(self) -> configs.Config:
        """The settings of the run, or of the first member of an ensemble."""
        folder = self.run
        if (folder / "members" / "1").exists():
            folder = folder / "members" / "1"
        elif not (folder / "config.toml").exists():  # a probe
            folder = folder / "fine-tuned"
        return runs.load_config(runs.Run(folder))

    def copy(self, folder: Path) -> Trained:
        """Return the same with a copy of the run, which may be changed."""
        return replace(self, run=Path(shutil.copytree(self.run, folder / self.run.name)))


Build = Callable[[Path], Trained]


def write_sources(
    folder: Path, settings: dict[str, Any], *, series: int = 1, empty: float = 0.0
) -> tuple[Path, Path]:
    """Write the table to train on and that to predict; `empty` is the share of missing targets."""
    known, new = make_rows(180 // series, series=series), make_rows(40, seed=1, series=series)
    if empty:
        lost = np.random.default_rng(2).random(known.num_rows) < empty
        column = pa.array(np.where(lost, np.nan, known["c"].to_numpy()), from_pandas=True)
        known = known.set_column(known.column_names.index("c"), "c", column)
    if settings["data"].get("future"):  # the plan is known ahead of what it is planned for
        keep = np.arange(40) < 40 - HORIZON
        for name in ("a", "b", "c"):
            values = pa.array(np.where(np.tile(keep, series), new[name], np.nan), from_pandas=True)
            new = new.set_column(new.column_names.index(name), name, values)
    paths = folder / "known.parquet", folder / "new.parquet"
    for table, path in zip((known, new), paths, strict=True):
        if not path.exists():
            pq.write_table(table, path)
    return paths


def job(*, series: int = 1, empty: float = 0.0, **sections: Any) -> Build:
    """Return what trains a kind from these sections of a config."""

    def build(folder: Path) -> Trained:
        settings = merged(merged(SMALL, sections), {"out": str(folder / "runs")})
        known, new = write_sources(folder, settings, series=series, empty=empty)
        settings = merged(settings, {"data": {"path": str(known)}})
        return Trained(slipstream.train(settings, quiet=True).run, new, known)

    return build


def classes(**sections: Any) -> Build:
    """A classifier of the column `state`."""
    data = {"task": "classify", "targets": ["state"], "inputs": ["a", "b", "c"], "horizon": 0}
    return job(**merged({"data": data, "train": {"loss": "cross_entropy"}}, sections))


def prepared(*steps: dict[str, Any], **sections: Any) -> Build:
    return job(**merged({"data": {"prepare": list(steps)}}, sections))


def joined(folder: Path) -> Trained:
    """A run that joins another table."""
    other = make_rows(60, seed=3).select(["time", "p"]).rename_columns(["time", "outside"])
    other = other.set_column(0, "time", pa.array(START + np.arange(60) * np.timedelta64(4, "h")))
    pq.write_table(other, folder / "weather.parquet")
    step = {"step": "join", "path": str(folder / "weather.parquet"), "label": "end"}
    return prepared(step, data={"inputs": ["a", "b", "outside"]})(folder)


def labelled(folder: Path) -> Trained:
    """A classifier with a table of labels."""
    rows = np.arange(5, 175, 4)
    names = np.array(["calm", "fast", "wild"])[rows // 7 % 3]
    times = START + rows * np.timedelta64(1, "h")
    pq.write_table(
        pa.table({"start": times, "end": times, "label": names}), folder / "labels.parquet"
    )
    path = str(folder / "labels.parquet")
    data = {"task": "classify", "labels": path, "targets": None, "horizon": 0}
    return job(data=data, train={"loss": "cross_entropy"})(folder)


def pretrained(folder: Path) -> Trained:
    """An encoder."""
    settings = merged(SMALL, {"out": str(folder / "runs"), "pretrain": {"length": 2}})
    known, new = write_sources(folder, settings)
    settings = merged(settings, {"data": {"path": str(known)}})
    return Trained(slipstream.pretrain(settings, quiet=True).run, new, known)


def fine_tuned(folder: Path) -> Trained:
    """A run that starts from an encoder."""
    (folder / "encoder").mkdir()
    encoder = pretrained(folder / "encoder")
    model = {"bidirectional": True, "layer_norm": True}
    train = {"init_from": str(encoder.run), "freeze_epochs": 1, "epochs": 2}
    return job(model=model, train=train)(folder)


class Stop(Exception):
    """Ends a run from a function that its events are passed to."""


def stopped(build: Build, *, verb: str = "train") -> Build:
    """The run of another kind, stopped in the middle."""

    def stop(event: Any) -> None:
        if isinstance(event, (Epoch, TrialEnd)):
            raise Stop

    def build_stopped(folder: Path) -> Trained:
        finished = build(folder)
        settings = configs.load(finished.run / "config.toml")
        settings = configs.replace_settings(settings, {"train.epochs": 4, "name": "stopped"})
        with contextlib.suppress(Stop):
            getattr(slipstream, verb)(settings, finished.table, quiet=True, on_event=stop)
        (run,) = (folder / "runs").glob("stopped-*")
        assert not (run / "metrics.json").exists()
        return replace(finished, run=run)

    return build_stopped


def searched(build: Build, **tune: Any) -> Build:
    """A search around the settings of another kind."""

    def build_search(folder: Path) -> Trained:
        finished = build(folder)
        settings = configs.load(finished.run / "config.toml").model_dump(exclude_unset=True)
        space = {"train.lr": [0.01, 0.02]}
        few = {"trials": 2, "retrain": 1, "retrain_seeds": 2, "space": space, **tune}
        settings |= {"tune": few, "name": "search"}
        return replace(finished, run=slipstream.tune(settings, finished.table, quiet=True).run)

    return build_search


def chosen(build: Build, **options: Any) -> Build:
    """The best model around the settings of another kind, of a few seconds."""

    def build_auto(folder: Path) -> Trained:
        finished = build(folder)
        settings = configs.load(finished.run / "config.toml").model_dump(exclude_unset=True)
        settings |= {"name": "auto"}
        study = slipstream.auto(settings, finished.table, minutes=0.3, quiet=True, **options)
        return replace(finished, run=study.run)

    return build_auto


def refitted(build: Build) -> Build:
    """The model of `chosen` that was trained on all rows, and so is untested."""
    search = chosen(build, prefer="fast")

    def build_refit(folder: Path) -> Trained:
        finished = search(folder)
        study = slipstream.auto(resume=finished.run, data=finished.table, refit=True, quiet=True)
        assert study.refit is not None
        return replace(finished, run=study.refit)

    return build_refit


def from_table(build: Build) -> Build:
    """The run of another kind, trained on a table in memory."""

    def build_from_table(folder: Path) -> Trained:
        finished = build(folder)
        settings = runs.load_config(runs.Run(finished.run)).model_dump(exclude_unset=True)
        settings["data"].pop("path")
        table = pq.read_table(finished.source)
        result = slipstream.train({**settings, "name": "table"}, table, quiet=True)
        return replace(finished, run=result.run, table=table)

    return build_from_table


def joint(*builds: Build, **options: Any) -> Build:
    """An ensemble of other kinds, which have the same data."""

    def build_ensemble(folder: Path) -> Trained:
        members = [build(folder) for build in builds]
        data = members[0].table
        result = slipstream.ensemble(
            [one.run for one in members], data, out=folder / "runs", quiet=True, **options
        )
        return replace(members[0], run=result.run)

    return build_ensemble


def fitted(build: Build, *names: str) -> Build:
    """An ensemble of baselines of another kind, as `slipstream auto` writes it."""

    def build_baselines(folder: Path) -> Trained:
        finished = build(folder)
        config = configs.load(finished.run / "config.toml")
        weights = [1 / len(names)] * len(names)
        members = [(config, name) for name in names]
        return replace(finished, run=build_run(folder / "runs" / "best", members, weights))

    return build_baselines


def exported(build: Build, to: str) -> Build:
    """An export of another kind that is a run itself."""

    def build_export(folder: Path) -> Trained:
        finished = build(folder)
        slipstream.export(finished.run, to=to, out=folder / "export", quiet=True)
        found = [path.parent for path in (folder / "export").rglob("config.toml")]
        return replace(finished, run=found[0])

    return build_export


def shared(build: Build) -> Build:
    """A run whose models were trained in two shares."""

    def build_shares(folder: Path) -> Trained:
        finished = build(folder)
        settings = configs.load(finished.run / "config.toml")
        for number in (1, 2):
            slipstream.train_share(settings, folder / "runs" / "shares", (number, 2), quiet=True)
        result = slipstream.train(settings, folder=folder / "runs" / "shares", quiet=True)
        return replace(finished, run=result.run)

    return build_shares


def probed(folder: Path) -> Trained:
    """A probe of an encoder."""
    settings = merged(SMALL, {"out": str(folder / "runs"), "pretrain": {"length": 2}})
    known, new = write_sources(folder, settings)
    settings = merged(settings, {"data": {"path": str(known)}})
    train = {"epochs": 2, "freeze_epochs": 1}
    found = slipstream.probe(settings, merged(settings, {"train": train}), seeds=2, quiet=True)
    return Trained(found.run, new, known)


ESTIMATE: dict[str, Any] = {"data": {"horizon": 0}}
CARRIED: dict[str, Any] = {"train": {"state": "carried", "batch": 4}}
QUANTILES: dict[str, Any] = {"train": {"loss": "quantile"}}
REPEATS: dict[str, Any] = {"train": {"repeats": 2}}
FOLDS: dict[str, Any] = {"data": {"split": {"walk_forward": 2}}}
STREAMED: dict[str, Any] = {"engine": {"home": "stream", "workers": 0}}
FUTURE: dict[str, Any] = {"data": {"future": ["p"]}}
SERIES: dict[str, Any] = {"series": 2, "data": {"id": "id"}}
CHANNELS: dict[str, Any] = {
    "data": {"channels": "independent", "inputs": ["a", "b", "c"], "targets": ["b", "c"]}
}
SEVERAL: dict[str, Any] = {"data": {"inputs": ["a", "b", "c"], "targets": ["b", "c"]}}
SMOOTHED: dict[str, Any] = {"predict": {"filter": {"kind": "ema", "rows": 3}}}
LAG = {"step": "formula", "name": "a", "value": "a - lag(a, 2)"}
CALENDAR = {"step": "calendar", "features": ["hour"]}


def model(kind: str, **settings: Any) -> dict[str, Any]:
    return {"model": {"kind": kind, **settings}}


def both(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of several kinds together."""
    result: dict[str, Any] = {}
    for part in parts:
        result = merged(result, part)
    return result


KINDS: dict[str, Build] = {
    # every network, ahead and at the last row
    **{kind: job(**model(kind)) for kind in SPECS},
    **{f"{kind} at a row": job(**both(ESTIMATE, model(kind))) for kind in SPECS},
    "own network": job(**model("tests.models.nets:Mixer")),
    # what is predicted
    "classes": classes(),
    "quantiles": job(**QUANTILES),
    "several targets": job(**SEVERAL),
    "channels": job(**CHANNELS),
    "missing targets": job(empty=0.2),
    "labels": labelled,
    "range": job(model={"output_range": [19.0, 21.0]}),
    # what it is trained on
    "series": job(**SERIES),
    "static": job(**both(SERIES, {"data": {"static": ["k"]}})),
    "future": job(**FUTURE),
    "no time": job(data={"time": None}),
    "streamed": job(**STREAMED),
    "table": from_table(job()),
    "prepared": prepared(LAG),
    "resampled": prepared({"step": "resample", "every": "2h"}),
    "smoothed": prepared({"step": "filter", "kind": "ema", "columns": ["a"], "rows": 3}),
    "padded": prepared({"step": "pad"}, **ESTIMATE),
    "calendar": prepared(CALENDAR, data={"future": ["hour_sin", "hour_cos"]}),
    "joined": joined,
    "marked": prepared(
        {"step": "label", "name": "move", "column": "a", "rows": 2, "kind": "sign"},
        data={"task": "classify", "targets": ["move"], "horizon": 0},
        train={"loss": "cross_entropy"},
    ),
    # how it is trained
    "repeats": job(**REPEATS),
    "walk-forward": job(**FOLDS),
    "carried": job(**CARRIED),
    "pre-trained": pretrained,
    "fine-tuned": fine_tuned,
    "shares": shared(job(**REPEATS)),
    "filtered": job(**SMOOTHED),
    # several runs
    "search": searched(job()),
    "search, nothing retrained": searched(job(), retrain=0),
    "search of auto": chosen(job(), prefer="fast"),
    "search of auto, quantiles": chosen(job(**QUANTILES), prefer="fast"),
    "search of auto, classes": chosen(classes(), prefer="fast"),
    "search of auto, walk-forward": chosen(job(**FOLDS), prefer="fast"),
    "refit": refitted(job()),
    "ensemble": joint(job(), job(**model("mlp"))),
    "ensemble of baselines": fitted(job(), "gbm", "ridge"),
    "probe": probed,
    "hub export": exported(job(), "hub"),
    "ray export": exported(job(), "ray"),
    # not finished
    "stopped": stopped(job()),
    "stopped repeats": stopped(job(**REPEATS)),
    "stopped encoder": stopped(pretrained, verb="pretrain"),
    "stopped search": stopped(searched(job()), verb="tune"),
    # combinations
    "classes, repeats, walk-forward": classes(**both(REPEATS, FOLDS)),
    "classes, filtered": classes(**SMOOTHED),
    "classes, streamed": classes(**STREAMED),
    "classes, table": from_table(classes()),
    "classes, carried": classes(**CARRIED),
    "classes, ahead": classes(data={"horizon": 2}),
    "classes, search": searched(classes()),
    "classes, ensemble": joint(classes(), classes(**model("mlp"))),
    "classes, ensemble of baselines": fitted(classes(), "gbm", "logistic"),
    "classes, stopped": stopped(classes()),
    "quantiles, carried": job(**both(QUANTILES, CARRIED)),
    "quantiles, repeats": job(**both(QUANTILES, REPEATS)),
    "quantiles, at a row": job(**both(QUANTILES, ESTIMATE)),
    "quantiles, streamed": job(**both(QUANTILES, STREAMED)),
    "quantiles, channels": job(**both(QUANTILES, CHANNELS)),
    "quantiles, filtered": job(**both(QUANTILES, SMOOTHED)),
    "quantiles, ensemble": joint(job(**QUANTILES), job(**both(QUANTILES, model("tcn")))),
    "carried, at a row": job(**both(CARRIED, ESTIMATE)),
    "carried, filtered": job(**both(CARRIED, SMOOTHED)),
    "carried, future": job(**both(CARRIED, FUTURE)),
    "carried, prepared": prepared(LAG, **CARRIED),
    "carried, ensemble": joint(job(**CARRIED), job(**both(CARRIED, model("lstm")))),
    "streamed, future": job(**both(STREAMED, FUTURE)),
    "streamed, at a row": job(**both(STREAMED, ESTIMATE)),
    "streamed, series": job(**both(STREAMED, SERIES)),
    "streamed, repeats": job(**both(STREAMED, REPEATS)),
    "streamed, prepared": prepared(LAG, **STREAMED),
    "streamed, ensemble": joint(
        *(job(**both(STREAMED, model(kind))) for kind in ("gru", "mlp")),
        overrides="engine.home=host",
    ),
    "future, prepared": prepared(LAG, **FUTURE),
    "future, channels": job(**both(FUTURE, CHANNELS)),
    "future, static": job(**both(FUTURE, SERIES, {"data": {"static": ["k"]}})),
    "future, ensemble": joint(job(**FUTURE), job(**both(FUTURE, model("transformer")))),
    "repeats, walk-forward": job(**both(REPEATS, FOLDS)),
    "repeats, at a row": job(**both(REPEATS, ESTIMATE)),
    "repeats, channels": job(**both(REPEATS, CHANNELS)),
    "repeats, table": from_table(job(**REPEATS)),
    "walk-forward, missing": job(empty=0.2, **FOLDS),
    "walk-forward, ensemble": joint(job(**FOLDS), job(**both(FOLDS, model("linear")))),
    "walk-forward, search": searched(job(**FOLDS)),
    "table, search": searched(from_table(job())),
    "table, ensemble": joint(from_table(job()), from_table(job(**model("mlp")))),
    "table, stopped": stopped(from_table(job())),
    "prepared, repeats": prepared(LAG, **REPEATS),
    "prepared, at a row": prepared(LAG, **ESTIMATE),
    "prepared, series": prepared(LAG, **SERIES),
    "own network, repeats": job(**both(REPEATS, model("tests.models.nets:Mixer"))),
    "several targets, filtered": job(**both(SEVERAL, SMOOTHED)),
}


@cache
def train_kind(name: str, folder: Path) -> Trained:
    """Return the run of a kind; it is trained when first asked for."""
    (folder / name).mkdir()
    return KINDS[name](folder / name)
