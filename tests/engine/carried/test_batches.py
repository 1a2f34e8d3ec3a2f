from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.data import windows
from slipstream.engine import carried
from slipstream.engine.carried import CarriedSource, Pieces
from slipstream.engine.lanes import EpochStart, compute_lrs
from slipstream.engine.planning import make_plan
from slipstream.models.forecaster import OWN_KERNELS, build
from slipstream.models.losses import compute_window_losses
from tests.conftest import close, small_config, small_dataset, waves
from tests.engine.steps import run_steps

CARRIED = {"state": "carried", "batch": 2}
SIGNATURE = small_dataset(small_config(data={"horizon": 0, "targets": ["a"]})).signature
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def make_pieces(lengths):
    """Pieces with a row between each and the next, which belongs to none."""
    ends = np.cumsum(np.array(lengths) + 1) - 1
    return Pieces(ends - np.array(lengths), ends)


def read_chunks(grid):
    """The rows of each stream, one after the other, with what it reads twice left out."""
    return [
        [
            row
            for step in range(grid.num_steps)
            if not grid.is_idle[step, stream]
            for row in range(grid.first[step, stream], grid.last[step, stream] + 1)
        ]
        for stream in range(grid.num_streams)
    ]


@given(lengths, st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_every_row_is_read_once_an_epoch_and_weighs_the_same_within_its_step(
    lengths, rows, num_streams, seed
):
    pieces = make_pieces(lengths)
    every = np.concatenate([np.arange(*ends) for ends in zip(*pieces, strict=True)])
    for grid in (
        carried.divide_evenly(pieces, rows, num_streams, seed),
        carried.lay_out_whole(pieces, rows),
    ):
        assert sorted(row for rows in read_chunks(grid) for row in rows) == every.tolist()
        weights = grid.weigh(every, mean=True)
        assert weights.sum(axis=(1, 2)) == pytest.approx(1)
        assert (grid.weigh(every, mean=False) > 0).sum() == len(every)
    assert grid.num_streams <= len(lengths)


@settings(max_examples=25)
@given(lengths, st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_a_state_goes_on_from_row_to_row_and_is_zero_where_a_piece_begins(
    lengths, rows, num_streams, whole
):
    """The state counts rows; each epoch also brings those that one more stream has read before."""
    pieces = make_pieces(lengths)
    grid = carried.lay_out_whole(pieces, rows) if whole else None
    grid = grid or carried.divide_evenly(pieces, rows, num_streams, 0)
    values = np.ones((pieces.ends[-1] + 1, len(SIGNATURE.inputs) + 1), np.float32)
    series = windows.build_series(values, None, None, np.array([0, len(values)]), SIGNATURE)
    states = [torch.zeros(1, grid.num_streams, 1)]
    source = CarriedSource(series, grid, grid.weigh(pieces.begins, mean=False), states, 2)
    owner = np.searchsorted(pieces.begins, grid.first, side="right") - 1
    for epoch in range(grid.num_streams):
        for step in range(grid.num_steps):
            at = 0
            for batch in source.get_micro_batches(torch.tensor([step])):
                before = batch.carried.before[0]
                count = before.shape[1]
                wanted = grid.first[step] - pieces.begins[owner[step]]
                own = ~grid.is_idle[step, at : at + count]
                if whole or epoch == grid.num_streams - 1:
                    assert before[0, own, 0].tolist() == wanted[at : at + count][own].tolist()
                batch.carried.after.append(before + rows)
                at += count
            assert at == grid.num_streams


def plain_loop(config, dataset, begins, num_chunks, *, steps):
    """Truncated backpropagation through time as anyone would write it, of one series."""
    torch.manual_seed(config.seed)
    model = build(config.model, dataset.signature).train()
    train = config.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    series, losses, epoch = dataset.memory.series, [], 0
    ends = [None] * len(begins)
    end = int(dataset.memory.starts["train"].max()) + 16  # past the last row with targets
    while len(losses) < steps:
        rates = compute_lrs(train, EpochStart(epoch), num_chunks)
        states = [None, *ends[:-1]]
        for at in range(num_chunks):
            every = []
            for stream, begin in enumerate(begins):
                rows = torch.arange(begin + 16 * at, min(begin + 16 * (at + 1), end))
                sequence, state = model.core.layers[0](series.inputs[rows][:, None], states[stream])
                states[stream] = tuple(one.detach() for one in state)
                prediction = model.core.head(sequence[:, 0], None).view(len(rows), 4, -1, 1)
                targets = series.targets[rows[:, None] + 1 + torch.arange(4)]
                every.append(compute_window_losses(prediction, targets, train))
            loss = torch.cat(every).mean()
            optimizer.param_groups[0]["lr"] = rates[at]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            losses.append(loss.item())
        ends, epoch = states, epoch + 1
    return losses, model.state_dict()


def compare_with_plain_loop(per_pass):
    """Two streams of one series: the second goes on with what the first has left."""
    config = small_config(train={**CARRIED, "lr": 0.01, "epochs": 6, "clip": 0.5})
    dataset = small_dataset(config)
    wanted, reference = plain_loop(config, dataset, (0, 144), 9, steps=27)
    losses, weights = run_steps(config, dataset, steps=27, batch=per_pass)
    close(losses, wanted, rel=1e-4)
    for name, value in reference.items():
        close(weights[name], value, rel=2e-3)


@pytest.mark.parametrize("per_pass", [None, 1])
def test_the_step_is_what_a_plain_loop_does(per_pass):
    compare_with_plain_loop(per_pass)


@pytest.mark.usefixtures("native_kernels")
def test_the_step_is_what_a_plain_loop_does_with_our_kernels():
    plan = make_plan(small_config(train=CARRIED), data_bytes=0)
    assert OWN_KERNELS in plan.rnn
    compare_with_plain_loop(None)


def find_rows(dataset, context=16):
    index, signature = dataset.index, dataset.signature
    starts = dataset.memory.starts["train"].numpy()
    rows = carried.find_target_rows(starts, index, signature, 1)
    return rows, carried.find_pieces(rows, index.segments, context)


def test_training_reads_and_predicts_its_own_rows_only_and_no_piece_holds_a_gap():
    table = waves(400)
    time = table["time"].to_numpy().copy()
    time[100:] += 50
    dataset = small_dataset(table=table.set_column(0, "time", pa.array(time)))
    rows, pieces = find_rows(dataset)
    assert pieces.begins.tolist() == [0, 100]
    assert pieces.ends.tolist() == [96, 276]  # four rows are predicted after each
    assert rows.tolist() == [*range(96), *range(100, 276)]


def test_rows_whose_targets_are_missing_are_read_and_not_predicted():
    table = waves(400)
    a = table["a"].to_numpy().copy()
    a[[5, 50]] = np.nan
    data = {"horizon": 0, "inputs": ["b", "c"], "targets": ["a"]}
    dataset = small_dataset(small_config(data=data), table.set_column(1, "a", pa.array(a)))
    rows, pieces = find_rows(dataset)
    assert set(range(280)) - set(rows.tolist()) == {5, 50}
    assert (pieces.begins.tolist(), pieces.ends.tolist()) == ([0], [280])


def test_rows_of_another_set_before_the_training_rows_are_read_for_one_context_only():
    split = {"walk_forward": 2, "window": "rolling", "val": 0.1, "test": 0.4}
    config = small_config(data={"split": split})
    dataset = small_dataset(config)
    dataset = dataset.select_fold(dataset.folds[1])
    first = int(dataset.memory.starts["train"].min())
    assert first > 0
    rows, pieces = find_rows(dataset)
    assert rows.min() == first + 15
    assert pieces.begins.tolist() == [first]
