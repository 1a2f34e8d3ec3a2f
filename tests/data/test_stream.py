"""A streamed table gives what the same table gives in memory."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slipstream
from slipstream import UserError
from slipstream.data import dataset as datasets
from slipstream.data import stream as streams
from slipstream.data import windows
from slipstream.engine.batches import StreamBatching, StreamSource, TransferOptions
from tests.conftest import slow, small_config, waves
from tests.limits import FaultyDevice

SHAPES = {
    "one series": {},
    "series": {"id": "id"},
    "static": {"id": "id", "static": ["k"]},
    "future": {"id": "id", "static": ["k"], "future": ["b"]},
    "independent": {"channels": "independent", "inputs": ["a", "b"], "targets": ["a", "b"]},
    "estimate": {"horizon": 0, "targets": ["c"], "inputs": ["a", "b"]},
    "by": {"id": "id", "split": {"by": "id", "val": ["s1"], "test": ["s2"]}},
    "stride": {"stride": 3},
    "rows": {"id": "id", "split": {"rows": [60, 30, 30]}},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Three series with a gap each, in row groups that cut across them."""
    table = waves(600).to_pydict()
    table["id"] = [f"s{i // 200}" for i in range(600)]
    table["k"] = [float(i // 200) for i in range(600)]
    table["time"] = [t + 5 * (t % 200 > 150) + 1000 * (t // 200) for t in table["time"]]
    path = tmp_path_factory.mktemp("stream") / "t.parquet"
    pa.parquet.write_table(pa.table(table), path, row_group_size=70)
    return path


def both(path, shape, scan_rows=100, **engine):
    data = {"path": str(path), "inputs": ["a", "b", "c"], "targets": ["a", "c"]} | SHAPES[shape]
    config = small_config(data=data)
    streamed = small_config(data=data, engine={"home": "stream", "buffer_rows": 150} | engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "SCAN_ROWS", scan_rows)
        return datasets.load_dataset(config), datasets.load_dataset(streamed), streamed


@pytest.mark.parametrize("scan_rows", [37, 100, 10_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_layout_scaler_and_windows_are_those_of_the_table_in_memory(path, shape, scan_rows):
    whole, streamed, _ = both(path, shape, scan_rows)
    assert streamed.memory is None
    assert streamed.num_windows == whole.num_windows
    assert streamed.signature == whole.signature
    assert streamed.index.series_names == whole.index.series_names
    np.testing.assert_array_equal(streamed.index.offsets, whole.index.offsets)
    np.testing.assert_array_equal(streamed.index.breaks, whole.index.breaks)
    for name in whole.scaler.shift:
        assert streamed.scaler.shift[name] == pytest.approx(whole.scaler.shift[name], rel=1e-6)
        assert streamed.scaler.size[name] == pytest.approx(whole.scaler.size[name], rel=1e-6)


def by_start(dataset, which, rows):
    """Every window of a set by its first row, however many pieces it comes in."""
    found = {}
    for piece in dataset.iter_chunks(which, None, rows=rows, with_time=True):
        inputs, targets, static = windows.gather_raw(piece.series, piece.starts)
        owners = piece.series_ids[piece.series.find_series(piece.starts)]
        for i, start in enumerate((piece.starts + piece.first_row).tolist()):
            assert start not in found
            given = None if static is None else static[i]
            time = piece.time[start - piece.first_row]
            found[start] = inputs[:, i], targets[i], given, int(owners[i]), time
    return found


@pytest.mark.parametrize("rows", [slow(1), 64, slow(10_000)])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_hold_every_window_once_whatever_their_size(path, shape, rows):
    whole, streamed, _ = both(path, shape)
    for which in ("train", "val", "test"):
        wanted, found = by_start(whole, which, 1), by_start(streamed, which, rows)
        assert found.keys() == wanted.keys()
        for start, window in wanted.items():
            other = found[start]
            torch.testing.assert_close(other[0], window[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(other[1], window[1], atol=1e-5, rtol=1e-5)
            assert (other[2] is None) == (window[2] is None)
            if shape == "future":
                torch.testing.assert_close(other[2], window[2], atol=1e-5, rtol=1e-5)
            assert other[3:] == window[3:]


def epoch_of(home, epoch, *, at=0):
    """Steps of one epoch: inputs and weights of each pass."""
    home.start_epoch(epoch, step=at)
    steps = []
    advance = home.wrap_program(
        lambda: steps.append([(s.batch.inputs.clone(), s.weights.clone()) for s in home.buffers])
    )
    for _ in range(at, home.num_steps):
        advance()
    return steps


@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize(("effective", "batch"), [slow(32, 32), slow(32, 16), (33, 20), slow(7, 7)])
def test_every_window_comes_once_an_epoch_shuffled_anew(path, workers, effective, batch):
    if workers and (effective, batch) != (32, 16):
        pytest.skip("workers take seconds to start; one shape is enough")
    _, streamed, config = both(path, "series")
    home = open_source(
        streamed, config, 3, windows_per_step=effective, windows_per_pass=batch, workers=workers
    )
    assert home.num_steps == -(-streamed.num_windows["train"] // effective)
    wanted = sorted(
        float(window[0].double().sum()) for window in by_start(streamed, "train", 1).values()
    )
    epochs = [epoch_of(home, epoch) for epoch in (0, 1, 0)]
    for steps in epochs:
        sums, counts = [], []
        for shares in steps:
            real = [(inputs[:, weights > 0], weights[weights > 0]) for inputs, weights in shares]
            counts.append(sum(len(weights) for _, weights in real))
            assert float(sum(weights.sum() for _, weights in real)) == pytest.approx(1)
            sums += [float(v) for inputs, _ in real for v in inputs.double().sum(dim=(0, 2))]
        assert counts[:-1] == [effective] * (len(counts) - 1)
        np.testing.assert_allclose(sorted(sums), wanted, rtol=1e-5, atol=1e-5)
    firsts = [steps[0][0][0] for steps in epochs]
    assert torch.equal(firsts[0], firsts[2])
    assert not torch.equal(firsts[0], firsts[1])
    if not workers:
        resumed = epoch_of(home, 1, at=2)
        assert all(
            torch.equal(a[0][0], b[0][0]) for a, b in zip(resumed, epochs[1][2:], strict=True)
        )
    home.close()
    assert not multiprocessing.active_children()


def open_source(streamed, config, seed, *, workers=0, **sizes):
    sizes = {"windows_per_step": 32, "windows_per_pass": 16} | sizes
    options = TransferOptions(torch.device("cpu"), config.engine, workers)
    return StreamSource(streamed.stream, "train", StreamBatching(seed=seed, **sizes), options)


@pytest.mark.parametrize("seed", [2**29, 2**31, 20260131120000, 2**63 - 1])
def test_any_seed_of_the_config_gives_an_order(path, seed):
    _, streamed, config = both(path, "series")
    one, other = (open_source(streamed, config, s) for s in (seed, seed - 1))
    first, again, others = epoch_of(one, 1), epoch_of(one, 1), epoch_of(other, 1)
    assert all(torch.equal(a[0][0], b[0][0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0][0], others[0][0][0])


@pytest.mark.parametrize(("effective", "batch"), [(32, 32), (32, 16), (33, 20), (7, 7)])
def test_windows_that_are_skipped_are_never_put_together(path, effective, batch):
    """A resume late in a long epoch holds a batch or two at a time, not all that went before."""
    _, streamed, config = both(path, "series")
    home = open_source(streamed, config, 3, windows_per_step=effective, windows_per_pass=batch)
    whole = epoch_of(home, 1)
    largest = []

    def note(name, result):
        if name == "cat" and result.ndim == 3:
            largest.append(result.shape[1])

    for at in (1, 5, home.num_steps - 1):
        with FaultyDevice(note):
            rest = epoch_of(home, 1, at=at)
        for mine, theirs in zip(rest, whole[at:], strict=True):
            for (inputs, weights), (wanted, theirs_weights) in zip(mine, theirs, strict=True):
                assert torch.equal(weights, theirs_weights)
                assert torch.equal(inputs[:, weights > 0], wanted[:, weights > 0])
    assert max(largest) <= 2 * batch


@pytest.mark.slow
def test_smaller_passes_take_the_same_windows_from_several_workers(path):
    """Where memory runs out in mid-epoch, the rest of it holds what was not trained on yet."""
    _, streamed, config = both(path, "series")
    how = {"workers": 2, "windows_per_step": 32, "windows_per_read": 32}
    found = []
    for batch in (32, 16):
        home = open_source(streamed, config, 3, windows_per_pass=batch, **how)
        steps = epoch_of(home, 1, at=3)
        found.append([torch.cat([i[:, w > 0] for i, w in step], dim=1) for step in steps])
        home.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_an_error_in_a_worker_of_the_loader_has_no_traceback(tmp_path, path):
    copy = tmp_path / "t.parquet"
    copy.write_bytes(path.read_bytes())
    _, streamed, config = both(f"file://{copy}", "series")
    home = open_source(streamed, config, 3, workers=1)
    copy.write_bytes(path.read_bytes())
    with pytest.raises(UserError) as error:
        epoch_of(home, 0)
    assert str(error.value) == f"file://{copy}: was replaced since the data were read; start again"
    home.close()


def test_a_home_closes_as_often_as_it_is_asked_to(path):
    _, streamed, config = both(path, "series")
    home = open_source(streamed, config, 3)
    epoch_of(home, 0)
    home.close()
    home.close()


@pytest.mark.parametrize("suffix", [".parquet", slow(".arrow")])
def test_a_streamed_run_scores_what_a_run_in_memory_scores(tmp_path, suffix):
    table = waves(1200)
    path = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=200)
    else:
        pa.feather.write_feather(table, str(path), chunksize=200, compression="uncompressed")
    sections = {"data": {"path": str(path)}, "train": {"epochs": 4, "lr": 0.02, "batch": 16}}
    whole = slipstream.train(small_config(tmp_path, **sections))
    streamed = slipstream.train(
        small_config(
            tmp_path, engine={"home": "stream", "buffer_rows": 400, "workers": 0}, **sections
        )
    )
    assert streamed.summary["plan"]["home"] == "stream"
    assert streamed.summary["windows"] == whole.summary["windows"]
    assert streamed.baselines["ridge"]["metrics"]["test"] == pytest.approx(
        whole.baselines["ridge"]["metrics"]["test"], rel=1e-3
    )
    assert streamed.metrics["test"]["mae"] == pytest.approx(whole.metrics["test"]["mae"], rel=0.15)
    tables = [pa.parquet.read_table(r.run / "predictions.parquet") for r in (whole, streamed)]
    for name in ("series", "row", "time", "step"):
        assert tables[0][name].to_pylist() == tables[1][name].to_pylist()
    slipstream.report(streamed.run)
    again = slipstream.evaluate(streamed.run)
    assert again["metrics"]["mae"] == pytest.approx(streamed.metrics["test"]["mae"], rel=1e-5)


def test_a_folder_of_files_is_streamed_file_by_file(tmp_path):
    for i in range(3):
        pa.parquet.write_table(waves(200, seed=i), tmp_path / f"{i}.parquet", row_group_size=64)
    data = {"path": str(tmp_path), "inputs": ["a"]}
    whole = datasets.load_dataset(small_config(data=data))
    streamed = datasets.load_dataset(small_config(data=data, engine={"home": "stream"}))
    assert (
        streamed.index.series_names
        == whole.index.series_names
        == ("0.parquet", "1.parquet", "2.parquet")
    )
    assert streamed.num_windows == whole.num_windows


def test_a_stream_is_small_when_it_travels_to_a_worker(path):
    _, streamed, _ = both(path, "series")
    assert len(pickle.dumps(streamed.stream)) < 20_000


@given(groups=st.lists(st.integers(1, 50), min_size=1, max_size=12), rows=st.integers(1, 80))
def test_stretches_cover_every_row_once(path, groups, rows):
    _, streamed, _ = both(path, "one series", 10_000)
    total = sum(groups)
    firsts = tuple(np.cumsum([0, *groups[:-1]]).tolist())
    stream = replace(
        streamed.stream,
        table=replace(streamed.stream.table, num_rows=total, row_groups=firsts),
        index=replace(streamed.index, offsets=np.array([0, total])),
    )
    found = stream.plan_chunks(rows)
    assert found[0][0] == 0
    assert found[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(0 < end - begin <= 2 * rows + max(groups) for begin, end in found)


def test_what_cannot_be_streamed_is_said(tmp_path, path):
    for settings, said in (
        ({"missing": "forward"}, "data.missing does not work with engine.home"),
        ({"where": {"id": "s1"}}, "data.where does not work with engine.home"),
    ):
        with pytest.raises(UserError, match=said):
            datasets.load_dataset(
                small_config(data={"path": str(path)} | settings, engine={"home": "stream"})
            )
    with pytest.raises(UserError, match="reads Parquet and Arrow files"):
        datasets.load_dataset(small_config(engine={"home": "stream"}), waves())
    broken = waves(300).to_pydict()
    broken["a"][250] = None
    pa.parquet.write_table(pa.table(broken), tmp_path / "t.parquet", row_group_size=50)
    with pytest.raises(UserError, match=r't.parquet, row 251, column "a": is missing'):
        datasets.load_dataset(
            small_config(data={"path": str(tmp_path / "t.parquet")}, engine={"home": "stream"})
        )
    mixed = waves(300).append_column("id", pa.array(["x", "y"] * 150))
    pa.parquet.write_table(mixed, tmp_path / "m.parquet", row_group_size=50)
    with pytest.raises(UserError, match=r'row 3: series "x" continues here'):
        datasets.load_dataset(
            small_config(
                data={"path": str(tmp_path / "m.parquet"), "id": "id"}, engine={"home": "stream"}
            )
        )
