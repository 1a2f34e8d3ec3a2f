"""Rows without a target: no window predicts them, and they remain context of others."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError, evaluate, predict, runs, train
from slipstream.base import storage
from slipstream.config import Signature
from slipstream.data import dataset as datasets
from slipstream.data import series, windows
from slipstream.data.splits import WindowRanges
from slipstream.inference import trained
from slipstream.scoring import baselines
from tests.conftest import small_config, small_dataset, waves
from tests.logs import read_lines

ESTIMATE = {"horizon": 0, "targets": ["c"]}
GONE = [50, 51, 52, 130, 300, 301, 330, 390]
NAMES = ("train", "val", "test")


def without(rows, columns=("c",), table=None):
    """The waves, with some values missing."""
    content = (waves() if table is None else table).to_pydict()
    for name in columns:
        content[name] = [None if i in rows else v for i, v in enumerate(content[name])]
    return pa.table(content)


def targets_of(dataset, which):
    """[windows, predicted rows]: the rows that windows predict."""
    ahead = np.arange(dataset.signature.steps_out) + dataset.signature.lead
    return dataset.memory.starts[which].numpy()[:, None] + ahead


def known_starts(dataset, gone, which):
    """A naive loop: the windows of a set that predict none of these rows."""
    rows = targets_of(dataset, which)
    return [int(own[0]) for own in rows if not set(own.tolist()) & set(gone)]


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 4),
)
def test_leaving_out_windows_agrees_with_a_naive_loop(flags, context, horizon, stride):
    signature = Signature(
        inputs=("a",),
        targets=("b",),
        static=(),
        shared=0,
        context=context,
        horizon=horizon,
        channels="together",
        quantiles=(),
        step=None,
    )
    gone = np.array(flags)
    length, half = signature.lead + signature.steps_out, len(flags) // 2
    pieces = [(0, half), (half, len(flags))]
    counts = [max((end - begin - length) // stride + 1, 0) for begin, end in pieces]
    firsts = [begin for begin, _ in pieces]
    every = WindowRanges(np.array(firsts), np.array(counts), stride)
    kept = every.exclude(series.encode_runs(gone), signature)
    ahead = np.arange(signature.steps_out) + signature.lead
    wanted = [start for start in every.list_starts() if not gone[start + ahead].any()]
    assert kept.list_starts().tolist() == wanted
    assert len(kept) == len(wanted)


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_runs_of_parts_are_the_runs_of_the_whole(first, second):
    parts = [series.encode_runs(np.array(first, dtype=bool))]
    parts.append(len(first) + series.encode_runs(np.array(second, dtype=bool)))
    whole = series.encode_runs(np.array(first + second, dtype=bool))
    assert series.join_runs(parts).tolist() == whole.tolist()


@pytest.mark.parametrize("policy", ["error", "forward", "drop"])
def test_a_row_that_lacks_only_its_target_breaks_no_context(policy):
    config = small_config(data=ESTIMATE | {"missing": policy})
    whole, dataset = small_dataset(config), small_dataset(config, without(GONE))
    assert dataset.index.breaks.tolist() == [0]
    assert dataset.index.num_rows == 400
    for name in NAMES:
        assert targets_of(dataset, name)[:, 0].tolist() == known_starts(whole, GONE, name)
    assert dataset.left_out == {"train": 4, "val": 2, "test": 2}
    assert dataset.memory.series.inputs.equal(whole.memory.series.inputs)
    (note,) = (note for note in dataset.notes if "left out" in note)
    assert note == (
        "left out windows whose target is missing: 4 of 265 train, 2 of 40 val, 2 of 80 test"
    )


def test_missing_targets_do_not_reach_the_scaler():
    config = small_config(data=ESTIMATE)
    known = np.delete(waves()["c"].to_numpy()[:280], [50, 51, 52, 130])
    dataset = small_dataset(config, without(GONE))
    assert dataset.scaler.shift["c"] == pytest.approx(known.mean())
    assert dataset.scaler.deviation["c"] == pytest.approx(known.std())


def test_forward_filling_gives_context_but_no_target():
    config = small_config(data={"missing": "forward"})
    whole, dataset = small_dataset(config), small_dataset(config, without(GONE, "abc"))
    for name in NAMES:
        assert targets_of(dataset, name)[:, 0].tolist() == known_starts(whole, GONE, name)
    values = dataset.memory.series.values
    assert values[51].equal(values[49])
    assert dataset.left_out["train"] > 0
    assert any("windows of which a target is missing" in note for note in dataset.notes)


def test_one_missing_target_of_several_leaves_the_window_out():
    config = small_config(data={"inputs": ["a"], "targets": ["b", "c"]})
    table = without([90], "b", without([200], "c"))
    whole, dataset = small_dataset(config), small_dataset(config, table)
    assert targets_of(dataset, "train")[:, 0].tolist() == known_starts(whole, [90, 200], "train")
    for name in NAMES:
        batch = windows.gather(dataset.memory.series, dataset.memory.starts[name])
        assert torch.isfinite(batch.targets).all()


def test_an_input_that_is_missing_is_still_refused():
    with pytest.raises(UserError, match=r'column "a": is missing'):
        small_dataset(small_config(data=ESTIMATE), without(GONE, "a"))
    with pytest.raises(UserError, match=r'column "c": is missing'):  # its past is an input
        small_dataset(small_config(data={"targets": ["c"]}), without(GONE))


def test_every_fold_leaves_out_its_own_windows():
    settings = {"split": {"walk_forward": 3, "test": 0.5, "val": 0.1}}
    config = small_config(data={"inputs": ["a", "b"], "targets": ["c"], **settings})
    whole, dataset = small_dataset(config), small_dataset(config, without(GONE))
    for before, after in zip(whole.folds, dataset.folds, strict=True):
        for name in NAMES:
            rows = targets_of(whole.select_fold(before), name)
            wanted = [int(own[0]) for own in rows if not set(own.tolist()) & set(GONE)]
            assert (after.starts[name] + 16).tolist() == wanted
            assert after.left_out[name] == len(rows) - len(wanted)
    assert dataset.left_out["test"] == sum(fold.left_out["test"] for fold in dataset.folds)


def test_a_stream_leaves_out_the_same_windows(tmp_path):
    path = tmp_path / "t.parquet"
    table = without(GONE)
    pa.parquet.write_table(table, path, row_group_size=70)
    settings = {"data": ESTIMATE | {"path": str(path)}}
    whole = datasets.load_dataset(small_config(**settings))
    streamed = datasets.load_dataset(small_config(**settings, engine={"home": "stream"}))
    assert streamed.left_out == whole.left_out
    assert streamed.num_windows == whole.num_windows
    assert streamed.scaler.shift["c"] == pytest.approx(whole.scaler.shift["c"])
    for name in NAMES:
        chunks = list(streamed.iter_chunks(name, None, rows=50))
        rows = itertools.chain(*((chunk.starts + chunk.first_row).tolist() for chunk in chunks))
        assert list(rows) == whole.memory.starts[name].tolist()
        for chunk in chunks:
            assert torch.isfinite(windows.gather(chunk.series, chunk.starts).targets).all()


def test_pre_training_learns_from_no_value_that_was_filled_in():
    config = small_config(data={"missing": "forward"}, train={"objective": "masked"})
    dataset = small_dataset(config, without(GONE, "b"))
    for name in ("train", "val"):
        assert not np.isin(targets_of(dataset, name), GONE).any()
    assert dataset.left_out["train"] > 0
    assert any("windows in which a value is missing" in note for note in dataset.notes)


def test_a_set_without_any_target_is_refused():
    with pytest.raises(UserError, match=r"no test window has a target: each of its 80 windows"):
        small_dataset(small_config(data=ESTIMATE), without(range(300, 400)))
    with pytest.raises(UserError, match=r"no train window has a target"):
        small_dataset(small_config(data=ESTIMATE), without(range(400)))


def test_a_stream_without_any_target_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(without(range(300)), path, row_group_size=70)
    with pytest.raises(UserError, match=r"no train window has a target"):
        datasets.load_dataset(
            small_config(data=ESTIMATE | {"path": str(path)}, engine={"home": "stream"})
        )


def test_the_baselines_repeat_the_last_known_value_or_the_mean():
    settings = {"inputs": ["a", "b"], "targets": ["c"], "context": 8, "horizon": 2, "period": 4}
    config = small_config(data=settings)
    dataset = small_dataset(config, without([*range(10), 60, 61]))
    past = windows.gather_past(dataset.memory.series, torch.tensor([0, 54, 100]), 8)[..., 0]
    assert past[:, 0].isnan().all()
    assert past[-3:, 1].tolist() == [float(dataset.memory.series.targets[59, 0])] * 3
    task_chunks = lambda which: dataset.iter_chunks(which, None, rows=0)  # noqa: E731
    fitted = baselines.fit_baselines(dataset, task_chunks)
    rows = targets_of(dataset, "train")[:, 0]
    mean = float(dataset.memory.series.targets[rows].double().mean())
    for name in ("repeat", "seasonal"):
        answer = fitted[name].predict(dataset.memory.series, torch.tensor([0, 54]))
        assert torch.isfinite(answer).all()
        assert answer[0].flatten().tolist() == pytest.approx([mean, mean], abs=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on data of which some targets are missing."""
    config = small_config(tmp_path_factory.mktemp("missing"), data=ESTIMATE)
    return train(config, without(GONE))


def test_a_run_counts_the_windows_that_it_leaves_out(run):
    assert run.summary["windows"] == {"train": 261, "val": 38, "test": 78}
    assert run.summary["windows_without_target"] == {"train": 4, "val": 2, "test": 2}
    assert np.isfinite(run.metrics["test"]["mae"])
    table = pa.parquet.read_table(run.run / "predictions.parquet")
    assert not {330, 390} & set(table["row"].to_pylist())
    assert np.isfinite(table["c"].to_numpy()).all()


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"repeats": 2}},
        {"engine": {"home": "host"}},
        {"engine": {"home": "loader"}},
        {"engine": {"home": "stream", "workers": 0}},
        {"train": {"repeats": 2}, "data": {"split": {"walk_forward": 2}}},
        {"data": {"targets": ["b", "c"], "inputs": ["a"], "horizon": 3, "period": 4}},
    ],
    ids=str,
)
def test_windows_that_pad_a_batch_need_no_target(tmp_path, sections):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(without([*range(40), *GONE]), path, row_group_size=70)
    data = ESTIMATE | {"path": str(path)} | sections.get("data", {})
    result = train(small_config(tmp_path, **sections | {"data": data}), quiet=True)
    assert np.isfinite(result.metrics["test"]["mae"])
    assert "recovery" not in {event["event"] for event in read_lines(runs.Run(result.run))}
    for one in filter(None, result.baselines.values()):
        assert np.isfinite(one["metrics"]["test"]["mae"])


def test_new_data_are_scored_where_targets_are_known_and_predicted_everywhere(run):
    scored = evaluate(run.run, without(GONE))
    assert scored["windows"] == 400 - 15 - len(GONE)
    assert scored["windows_without_target"] == len(GONE)
    assert "left out windows whose target is missing: 8 of 385" in scored["notes"]
    assert len(predict(run.run, without(GONE))) == 385
    assert len(predict(run.run, waves().drop_columns(["c"]))) == 385


def test_resampled_rows_with_an_unknown_part_are_unknown():
    config = small_config(data=ESTIMATE)
    dataset = small_dataset(config)
    finer = without([100, 101], table=waves(800).set_column(0, "time", pa.array(range(800))))
    halves = finer.set_column(0, "time", pa.array(np.arange(800) / 2))
    found = trained.load_new_data(
        config, dataset.signature, dataset.scaler, halves, targets=True, resample=True
    )
    assert found.left_out["all"] == 2
    batch = windows.gather(found.memory.series, found.memory.starts["all"])
    assert torch.isfinite(batch.targets).all()


def test_a_run_that_scored_invented_targets_can_still_be_evaluated(tmp_path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(without(GONE), path)
    config = small_config(tmp_path, data=ESTIMATE | {"path": str(path)}, model={"kind": "linear"})
    run = runs.Run(train(config, quiet=True).run)
    model = {one.name: one.read_bytes() for one in run.model.iterdir()}
    origin = json.loads(model["origin.json"])
    del origin["left_out"], model["manifest.json"]
    model["origin.json"] = json.dumps(origin).encode()
    with runs.replace_atomically(run.model) as folder:
        folder.mkdir()
        for name, content in model.items():
            (folder / name).write_bytes(content)
        sums = {name: storage.compute_sha256(folder / name) for name in model}
        runs.write_json(folder / "manifest.json", sums)
    scored = evaluate(run.folder)
    assert scored["windows"] == 78
    assert any("not quite those of training" in note for note in scored["notes"])
