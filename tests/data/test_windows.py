from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data import splits, windows
from slipstream.data.splits import SETS, SplitAssignment
from tests.conftest import small_config, small_dataset, waves


def naive_starts(breaks, sets, which, context, horizon, stride):
    """Try every start row, one after the other; stride counts within each stretch."""
    lead, steps = (context, horizon) if horizon else (context - 1, 1)
    found, last, count = [], None, 0
    for start in range(len(breaks) - lead - steps + 1):
        targets = range(start + lead, start + lead + steps)
        whole = not any(breaks[start + 1 : start + lead + steps])
        if whole and all(sets[row] == which for row in targets):
            unbroken = last is not None and start == last + 1 and not breaks[start]
            count = count + 1 if unbroken else 0
            last = start
            if count % stride == 0:
                found.append(start)
    return found


@given(
    rows=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=60),
    context=st.integers(1, 6),
    horizon=st.integers(0, 4),
    stride=st.integers(1, 3),
)
def test_starts_agree_with_trying_every_row(rows, context, horizon, stride):
    breaks = np.array([True] + [flag for flag, _ in rows[1:]])
    sets = np.array([which for _, which in rows], dtype=np.int8)
    lead, steps = (context, horizon) if horizon else (context - 1, 1)
    begins = np.flatnonzero(np.diff(sets, prepend=-1))
    runs = SplitAssignment(begins, sets[begins], len(sets))
    for which in range(len(SETS)):
        found = splits.find_ranges(
            np.flatnonzero(breaks), runs, set_index=which, lead=lead, steps_out=steps, stride=stride
        )
        wanted = naive_starts(breaks, sets, which, context, horizon, stride)
        assert found.list_starts().tolist() == wanted
        assert len(found) == len(wanted)
        for begin in range(0, len(breaks), 7):
            some = found.restrict(begin, begin + 7).list_starts().tolist()
            assert some == [start for start in wanted if begin <= start < begin + 7]


def test_no_window_crosses_a_gap_or_a_series_end():
    table = waves(300).to_pydict()
    table["time"] = [t if t < 100 else t + 7 for t in table["time"]]
    table["id"] = [0] * 200 + [1] * 100
    config = small_config(data={"id": "id", "inputs": ["a"], "split": {"rows": [60, 20, 20]}})
    dataset = small_dataset(config, table)
    for starts in dataset.memory.starts.values():
        assert len(starts)
        for start in starts.tolist():
            assert start // 100 == (start + 19) // 100 or not 90 <= start % 200 < 100


def test_context_may_reach_back_over_a_border_and_targets_may_not():
    config = small_config(data={"split": {"rows": [100, 50, 50]}})
    dataset = small_dataset(config)
    assert dataset.memory.starts["train"].tolist() == list(range(81))
    assert dataset.memory.starts["val"].tolist() == list(range(84, 131))
    assert dataset.memory.starts["test"].tolist() == list(range(134, 181))


@given(
    context=st.integers(1, 12),
    horizon=st.integers(0, 5),
    channels=st.sampled_from(["together", "independent"]),
    inputs=st.sampled_from([["a"], ["a", "b"], ["c", "b", "a"]]),
    targets=st.sampled_from([["a"], ["b", "a"], ["c"]]),
    seed=st.integers(0, 99),
)
def test_gather_agrees_with_slicing(context, horizon, channels, inputs, targets, seed):
    if horizon == 0:
        channels, inputs, targets = "together", ["a", "b"], ["c"]
    if channels == "independent":
        inputs = [*inputs, *(name for name in targets if name not in inputs)]
    table = waves(120).append_column("id", pa.array(["x"] * 70 + ["y"] * 50))
    table = table.append_column("k", pa.array([1.0] * 70 + [2.0] * 50))
    config = small_config(
        data={
            "context": context,
            "horizon": horizon,
            "channels": channels,
            "inputs": inputs,
            "targets": targets,
            "static": ["k"],
            "id": "id",
            "future": [name for name in inputs if name not in targets] if horizon else [],
        }
    )
    dataset = small_dataset(config, table)
    signature, series = dataset.signature, dataset.memory.series
    generator = torch.Generator().manual_seed(seed)
    starts = dataset.memory.starts["train"]
    some = starts[torch.randint(len(starts), (5,), generator=generator)]
    batch = windows.gather(series, some)

    def column(name):
        scaled = (table[name].to_numpy() - dataset.scaler.shift[name]) / dataset.scaler.size[name]
        return torch.from_numpy(scaled.astype(np.float32))

    sequence = 0
    for start in some.tolist():
        first = start + (context if horizon else context - 1)
        static = (table["k"][start].as_py() - dataset.scaler.shift["k"]) / dataset.scaler.size["k"]
        groups = (
            [[name] for name in signature.targets]
            if signature.sequences_per_window > 1
            else [signature.targets]
        )
        others = [name for name in signature.inputs if name not in signature.targets]
        for group in groups:
            names = [*others, *group] if channels == "independent" else signature.inputs
            for f, name in enumerate(names):
                wanted = column(name)[start : start + context]
                torch.testing.assert_close(batch.inputs[:, sequence, f], wanted)
            for c, name in enumerate(group):
                wanted = column(name)[first : first + max(horizon, 1)]
                torch.testing.assert_close(batch.targets[sequence, :, c], wanted)
            assert float(batch.static[sequence, 0]) == pytest.approx(static, rel=1e-6)
            ahead = batch.static[sequence, 1:].view(horizon or 1, len(signature.future))
            for u, name in enumerate(signature.future):
                assert name == signature.inputs[u]
                torch.testing.assert_close(ahead[:, u], column(name)[first : first + horizon])
            sequence += 1
    assert batch.inputs.shape[1] == sequence
    whole = windows.merge_channels(batch.targets, series.sequences_per_window)
    assert torch.equal(whole, series.targets[some[:, None] + series.target_rows])


def test_columns_that_are_input_and_target_are_stored_once():
    dataset = small_dataset(small_config(data={"inputs": ["a", "b"], "targets": ["a", "c"]}))
    assert dataset.signature.inputs == ("b", "a")
    assert dataset.signature.targets == ("a", "c")
    assert dataset.memory.series.values.shape[1] == 3
