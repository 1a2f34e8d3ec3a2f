"""Labels become class numbers; windows without one are none; nothing leaks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from slipstream import UserError
from slipstream.data import dataset as datasets
from slipstream.data import labels as classes
from slipstream.data import labels as selection
from slipstream.data import windows
from slipstream.data.files import read_files
from slipstream.data.table import read_memory
from slipstream.inference import trained
from tests.labelled import NAMES, class_config, states


def load(table, **sections):
    return datasets.load_dataset(class_config(**sections), table)


def numbers_of(dataset, which):
    rows = dataset.memory.starts[which][:, None] + dataset.memory.series.target_rows
    return dataset.memory.series.targets[rows, 0]


def with_labels(table, labels):
    return table.set_column(table.column_names.index("state"), "state", pa.array(labels))


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["b", "a", "b", None, "c"], ("a", "b", "c"), [1, 0, 1, -1, 2]),
        ([10, 2, None, -1, 2], ("-1", "2", "10"), [2, 1, -1, 0, 1]),
        ([10.0, 2.0, None, -1.0, 2.0], ("-1", "2", "10"), [2, 1, -1, 0, 1]),
        ([True, False, None, True, True], ("false", "true"), [1, 0, -1, 1, 1]),
        (["10", "2.0", "", "+2", " NaN "], ("2", "10"), [1, 0, -1, 0, -1]),
        (["none", "up", "", "null", "none"], ("none", "up"), [0, 1, -1, -1, 0]),
    ],
)
def test_classes_are_numbered_in_order_and_no_label_is_no_class(labels, names, numbers):
    source = read_memory({"y": pa.array(labels), "x": [1, 2, 3, 4, 5]})
    (coded,), found = classes.encode_labels([source], "y", "data.targets")
    assert found == names
    assert coded.read_column("y").to_pylist() == numbers
    assert coded.slice_rows(1, 3).read_column("y").to_pylist() == numbers[1:3]
    assert coded.read_column("x").to_pylist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "labels",
    [
        pa.array([2.0**63, 2.0**63 + 2048, 2.0**62]),
        pa.array([2**53 + 1, 2**53, 2**53 + 2], pa.decimal128(30, 2)),
        pa.array([str(2**63 + 1), str(2**63), f"{2**63 + 2}.0"]),
    ],
    ids=["float", "decimal", "text"],
)
def test_labels_of_many_digits_are_told_apart(labels):
    source = read_memory({"y": labels})
    assert len(classes.encode_labels([source], "y", "data.targets")[1]) == 3


def test_an_infinite_label_is_refused():
    source = read_memory({"y": [1.0, float("inf")]})
    with pytest.raises(UserError, match=r'row 2, column "y": is inf; labels'):
        classes.encode_labels([source], "y", "data.targets")


def test_classes_of_one_value_have_one_order():
    zeros = [f"{'0' * many}7" for many in range(30)]
    assert classes.sort_classes([*zeros, "3"]) == ("3", *sorted(zeros))


def test_files_share_their_classes(tmp_path):
    for name, labels in (("a.csv", "up\ndown"), ("b.csv", "flat\nup")):
        (tmp_path / name).write_text(f"y\n{labels}\n")
    sources = list(read_files([str(tmp_path)]))
    coded, names = classes.encode_labels(sources, "y", "data.targets")
    assert names == ("down", "flat", "up")
    assert [source.read_column("y").to_pylist() for source in coded] == [[2, 0], [1, 2]]


def test_labels_are_never_scaled_and_never_inputs():
    dataset = load(states())
    signature = dataset.signature
    assert signature.classes == NAMES
    assert signature.inputs == ("a", "b")
    assert signature.targets == ("state",)
    found = torch.cat([numbers_of(dataset, which) for which in ("train", "val", "test")])
    assert set(found.flatten().tolist()) == {0.0, 1.0, 2.0}
    truth = states()["state"].to_pylist()
    last = dataset.memory.starts["test"] + 7
    wanted = [NAMES.index(truth[row]) for row in last.tolist()]
    assert numbers_of(dataset, "test").flatten().tolist() == wanted


@pytest.mark.parametrize("scale", ["standard", "minmax", "none"])
def test_integer_labels_are_no_default_input_either(scale):
    table = states()
    codes = [7 * NAMES.index(name) for name in table["state"].to_pylist()]
    dataset = load(with_labels(table, codes), data={"scale": scale, "horizon": 2})
    assert dataset.signature.inputs == ("a", "b")
    assert dataset.signature.classes == ("0", "7", "14")
    assert set(numbers_of(dataset, "train").flatten().tolist()) == {0.0, 1.0, 2.0}


def test_windows_without_a_label_are_none():
    table = states()
    labels = table["state"].to_pylist()
    gone = {50, 51, 300, 1100, *range(400, 440)}
    dataset = load(with_labels(table, [None if i in gone else x for i, x in enumerate(labels)]))
    every = load(table)
    for which in ("train", "val", "test"):
        wanted = [s for s in every.memory.starts[which].tolist() if s + 7 not in gone]
        assert dataset.memory.starts[which].tolist() == wanted
    ahead = load(
        with_labels(table, [None if i in gone else x for i, x in enumerate(labels)]),
        data={"horizon": 3},
    )
    for which in ("train", "test"):
        for start in ahead.memory.starts[which].tolist():
            assert not gone & {start + 8, start + 9, start + 10}


def test_folds_leave_out_windows_without_a_label_too():
    table = states()
    gone = set(range(900, 960))
    labels = [None if i in gone else x for i, x in enumerate(table["state"].to_pylist())]
    split = {"walk_forward": 3, "purge": 4}
    dataset = load(with_labels(table, labels), data={"split": split})
    assert len(dataset.folds) == 3
    for fold in dataset.folds:
        for which, starts in fold.starts.items():
            assert not gone & set((starts + 7).tolist()), which
        assert int(fold.starts["train"].max()) + 4 < int(fold.starts["val"].min())
    assert dataset.num_windows == dataset.folds[-1].num_windows


@pytest.mark.parametrize("split", [{"walk_forward": 2}, {"train": 0.6, "val": 0.2, "test": 0.2}])
def test_the_future_changes_nothing_of_past_windows(split):
    """Rows after the first test row in another order: earlier windows stay what they are."""
    table, first = states(), 960
    order = np.arange(1200)
    order[first:] = np.random.default_rng(1).permutation(order[first:])
    mixed = table.take(pa.array(order)).set_column(0, "time", table["time"])
    one, other = (load(t, data={"split": split}) for t in (table, mixed))
    for dataset in (one, other):
        assert dataset.signature.classes == NAMES
    folds = [(a.starts, b.starts) for a, b in zip(one.folds, other.folds, strict=True)]
    for mine, theirs in folds[:1] or [(one.memory.starts, other.memory.starts)]:
        for which in ("train", "val"):
            assert torch.equal(mine[which], theirs[which])
            a, b = (windows.gather(d.memory.series, mine[which]) for d in (one, other))
            assert torch.equal(a.inputs, b.inputs)
            assert torch.equal(a.targets, b.targets)
        assert int(mine["val"].max()) + 7 < first
    assert one.count_classes().tolist() == other.count_classes().tolist()


def test_balanced_weights_come_from_the_first_folds_training_windows():
    table = states()
    dataset = load(table, data={"split": {"walk_forward": 3}})
    last = dataset.folds[0].starts["train"] + 7
    truth = np.array(table["state"].to_pylist())[last.numpy()]
    counts = [int((truth == name).sum()) for name in NAMES]
    assert dataset.count_classes().tolist() == counts
    weights = selection.balance_weights(np.array(counts))
    np.testing.assert_allclose(weights, [len(truth) / (3 * n) for n in counts])
    assert np.dot(weights, counts) == pytest.approx(sum(counts))
    assert selection.balance_weights(np.array([3, 0, 1])) == pytest.approx((4 / 6, 1.0, 2.0))


def test_a_stratified_split_cuts_each_class_and_shares_no_rows():
    table = states(3000)
    split = {"stratified": True, "train": 0.6, "val": 0.2, "test": 0.2}
    dataset = load(table, data={"split": split})
    truth = np.array([NAMES.index(name) for name in table["state"].to_pylist()])
    rows = {}
    for which, starts in dataset.memory.starts.items():
        rows[which] = {row for s in starts.tolist() for row in range(s, s + 8)}
        assert set(truth[starts + 7]) == {0, 1, 2}
    assert not rows["train"] & (rows["val"] | rows["test"])
    assert not rows["val"] & rows["test"]
    for number in range(3):
        of_class = {w: s[truth[s + 7] == number] for w, s in dataset.memory.starts.items()}
        assert int(of_class["train"].max()) < int(of_class["val"].min())
        assert int(of_class["val"].max()) < int(of_class["test"].min())
    values = table["a"].to_numpy()[sorted(rows["train"])]
    assert dataset.scaler.shift["a"] == pytest.approx(values.mean(), rel=1e-5)


def test_a_stream_gives_the_windows_that_memory_gives(tmp_path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(states(600), path, row_group_size=70)
    config = class_config(data={"path": str(path)}, engine={"home": "stream"})
    streamed, whole = datasets.load_dataset(config), load(states(600))
    assert streamed.stream is not None
    assert streamed.signature == whole.signature
    assert streamed.num_windows == whole.num_windows
    assert streamed.count_classes().tolist() == whole.count_classes().tolist()
    gone = states(600)["state"].to_pylist()
    gone[123] = None
    pa.parquet.write_table(with_labels(states(600), gone), path, row_group_size=70)
    streamed, whole = datasets.load_dataset(config), load(with_labels(states(600), gone))
    assert streamed.left_out == whole.left_out == {"train": 1, "val": 0, "test": 0}
    assert streamed.num_windows == whole.num_windows


def test_new_data_have_the_models_numbers():
    config, dataset = class_config(), load(states())
    table = states(600, seed=3)
    only = table.filter(pa.compute.not_equal(table["state"], "calm"))
    only = only.set_column(0, "time", pa.array(range(len(only))))
    found = trained.load_new_data(config, dataset.signature, dataset.scaler, only, targets=True)
    assert set(numbers_of(found, "all").flatten().tolist()) == {1.0, 2.0}
    strange = with_labels(table, [*table["state"].to_pylist()[:-1], "odd"])
    with pytest.raises(
        UserError, match=r'row 600, column "state": "odd" is not a class of the model'
    ):
        trained.load_new_data(config, dataset.signature, dataset.scaler, strange, targets=True)
    unlabelled = table.drop_columns(["state"])
    found = trained.load_new_data(
        config, dataset.signature, dataset.scaler, unlabelled, targets=False
    )
    assert found.num_windows["all"] == 593
    slower = table.set_column(0, "time", pa.array([2 * i for i in range(600)]))
    with pytest.raises(UserError, match="labels cannot be resampled"):
        trained.load_new_data(
            config, dataset.signature, dataset.scaler, slower, targets=True, resample=True
        )


@pytest.mark.parametrize(
    ("labels", "sections", "said"),
    [
        (["x"] * 1200, {}, 'column "state" holds one label, "x"'),
        ([0.5] * 1200, {}, r'row 1, column "state": is 0.5; labels \(data.targets\) are integers'),
        (list(range(1200)), {}, "more than 1,000 different labels"),
        ([None] * 1200, {}, "holds no label"),
        (["x", "y"] * 480 + [""] * 240, {}, "no test window has a label"),
        (
            ["x", "y"] * 600,
            {"train": {"class_weights": [1, 2, 3]}},
            "has 3 weights, but there are 2",
        ),
    ],
)
def test_labels_that_cannot_be_used_are_refused(labels, sections, said):
    with pytest.raises(UserError, match=said):
        load(with_labels(states(), labels), **sections)


def test_a_class_that_training_never_saw_is_noted():
    labels = ["x", "y"] * 500 + ["z"] * 200
    assert any("has the class z" in note for note in load(with_labels(states(), labels)).notes)
