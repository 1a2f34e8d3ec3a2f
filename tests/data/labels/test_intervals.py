"""A table of labels beside the data: which windows it makes, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream import UserError
from slipstream.data import dataset as datasets
from slipstream.data import labels, windows
from slipstream.data.series import SeriesIndex
from slipstream.data.table import read_memory
from slipstream.inference import trained
from tests.conftest import merged, small_config
from tests.labelled import CLASSIFY, states

LABELS = """start,end,label
10,20,up
20,40,down
100,109,up
700,720,down
850,900,up
910,950,down
970,1000,up
1050,1100,down
"""
ENDS = {"train": [20, 40, 109, 720], "val": [900, 950], "test": [1000, 1100]}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    states().drop_columns(["state"]).to_pandas().to_csv(path, index=False)
    return path


def configured(table, text=LABELS, **data):
    (table.parent / "labels.csv").write_text(text)
    settings = {"path": str(table), "labels": str(table.parent / "labels.csv"), "targets": None}
    return small_config(**merged(CLASSIFY, {"data": settings | data}))


def load(table, text=LABELS, **data):
    return datasets.load_dataset(configured(table, text, **data))


def ends(dataset):
    return {which: (starts + 7).tolist() for which, starts in dataset.memory.starts.items()}


def labels_of(dataset, which):
    series, starts = dataset.memory.series, dataset.memory.starts[which]
    numbers = series.targets[starts + 7, 0].long().tolist()
    return [dataset.signature.classes[number] for number in numbers]


@pytest.mark.parametrize("time", ["time", None])
def test_one_window_ends_where_a_label_ends(table, time):
    dataset = load(table, time=time, ignore=["time"])
    assert dataset.signature.classes == ("down", "up")
    assert dataset.signature.targets == ("label",)
    assert dataset.signature.inputs == ("a", "b")
    assert ends(dataset) == ENDS
    assert labels_of(dataset, "train") == ["up", "down", "up", "down"]
    assert labels_of(dataset, "test") == ["up", "down"]


def test_row_numbers_count_first_rows_that_are_left_out(table):
    lines = table.read_text().splitlines()
    for number in (1, 2, 3):
        time, _, b = lines[number].split(",")
        lines[number] = f"{time},,{b}"
    table.write_text("\n".join(lines) + "\n")
    dataset = load(table, missing="forward", time=None, ignore=["time"])
    found = {which: [end + 3 for end in some] for which, some in ends(dataset).items()}
    assert found == ENDS


def test_or_every_window_within_a_label(table):
    dataset = load(table, label_rows="every")
    within = {
        "train": [*range(10, 41), *range(100, 110), *range(700, 721)],
        "val": [*range(850, 901), *range(910, 951)],
        "test": [*range(970, 1001), *range(1050, 1101)],
    }
    assert ends(dataset) == within
    names = dict(zip(ends(dataset)["train"], labels_of(dataset, "train"), strict=True))
    assert [names[row] for row in (10, 20, 21, 40)] == ["up", "up", "down", "down"]


def test_a_label_with_too_few_rows_before_it_is_noted(table):
    dataset = load(table, LABELS + "1,3,down\n")
    assert ends(dataset) == ENDS
    assert any("1 of 9 labels have no window" in note for note in dataset.notes)
    assert not any("labels have no window" in note for note in load(table).notes)


def test_dates_and_series_are_matched(table):
    day = np.datetime64("2020-01-01T00:00", "m") + np.arange(200)
    parts = [
        {
            "id": [name] * 200,
            "time": pa.array(day.astype("datetime64[us]")),
            "x": np.sin(day.astype(int)),
        }
        for name in ("s1", "s2")
    ]
    both = pa.concat_tables([pa.table(part) for part in parts])
    text = "series,start,end,label\n" + "".join(
        f"{name},2020-01-01 {h:02}:05:00,2020-01-01 {h:02}:45:30,{label}\n"
        for name, marks in (("s1", "xyx"), ("s2", "yxx"))
        for h, label in enumerate(marks)
    )
    settings = {"id": "id", "split": {"train": 0.3, "val": 0.3, "test": 0.4}}
    config = configured(table, text, **settings)
    dataset = datasets.load_dataset(config, both)
    assert ends(dataset) == {"train": [45, 245], "val": [105, 305], "test": [165, 365]}
    assert labels_of(dataset, "train") == ["x", "y"]
    assert labels_of(dataset, "test") == ["x", "x"]
    found = trained.load_new_data(config, dataset.signature, dataset.scaler, both, targets=True)
    assert ends(found) == {"all": [45, 105, 165, 245, 305, 365]}


def test_files_are_named_with_or_without_their_ending(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "d").mkdir(exist_ok=True)
        states(400).drop_columns(["state"]).to_pandas().to_csv(tmp_path / f"d/{name}.csv")
    rows = [(n, e) for n in ("one", "two.csv") for e in (50, 100, 300, 350, 390)]
    text = "series,start,end,label\n" + "".join(
        f"{name},{end - 5},{end},{'ab'[i % 2]}\n" for i, (name, end) in enumerate(rows)
    )
    (tmp_path / "labels.csv").write_text(text)
    config = configured(tmp_path / "labels.csv", text, path=str(tmp_path / "d"), time="time")
    assert ends(datasets.load_dataset(config))["train"] == [50, 100, 450, 500]


@pytest.mark.parametrize(
    ("added", "data", "said"),
    [
        ("30,20,up", {}, 'labels.csv, line 10, column "end": is before its start'),
        ("1190,1200,up", {}, 'line 10: the label lies outside of series "table.csv"'),
        (
            "15,30,down",
            {},
            'line 10: is "down", but overlaps with labels.csv, line 2, which is "up"',
        ),
        ("60,70,", {}, 'line 10, column "label": is empty'),
        ("60.5,60.7,up", {}, "line 10: no row of the series lies between start and end"),
        ("60.5,70,up", {"time": None}, 'line 10, column "start": is not a row number'),
        ("60,70,up", {"time": None, "missing": "drop"}, 'data.missing = "drop" would shift them'),
        ("2020-01-01,70,up", {}, 'column "start": "2020-01-01" is not a number'),
        (
            "60,70,up",
            {"labels": "absent.csv"},
            "absent.csv: there is no such file or folder (data.labels)",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_line(table, added, data, said):
    with pytest.raises(UserError, match=re.escape(said)):
        load(table, LABELS + added + "\n", **data)


def test_an_unknown_series_is_refused_by_line(table):
    text = "series,start,end,label\ntable,10,20,up\nother,10,20,down\n"
    with pytest.raises(UserError, match='line 3, column "series": there is no series "other"'):
        load(table, text)


def test_a_column_of_that_name_is_no_input_by_accident(tmp_path):
    path = tmp_path / "table.csv"
    frame = states().drop_columns(["state"]).to_pandas()
    frame.assign(label=1.0).to_csv(path, index=False)
    with pytest.raises(UserError, match='has an input "label"'):
        load(path)
    assert ends(load(path, ignore=["label"])) == ENDS


def test_no_test_window_with_a_label_says_so(table):
    with pytest.raises(UserError, match="no test window has a label"):
        load(table, "\n".join(LABELS.split("\n")[:6]) + "\n")


def test_later_rows_and_labels_change_nothing_of_earlier_windows(table):
    one = load(table, label_rows="every")
    frame = states().drop_columns(["state"]).to_pandas()
    frame.loc[960:, ["a", "b"]] = frame.loc[960:, ["a", "b"]].to_numpy()[::-1]
    frame.to_csv(table, index=False)
    other = load(table, LABELS.replace("970,1000,up", "961,990,down"), label_rows="every")
    for which in ("train", "val"):
        assert ends(one)[which] == ends(other)[which]
        batches = [
            windows.gather(each.memory.series, each.memory.starts[which]) for each in (one, other)
        ]
        assert torch.equal(batches[0].inputs, batches[1].inputs)
        assert torch.equal(batches[0].targets, batches[1].targets)


def series_of_labels(names, rows):
    """Which series the labels of a table are of, by their names."""
    layout = SeriesIndex(
        series_names=tuple(names),
        offsets=np.arange(len(names) + 1),
        breaks=np.arange(len(names)),
        group_begins=np.zeros(1, dtype=np.int64),
        group_codes=np.zeros(1, dtype=np.int64),
        group_names=("",),
        step=None,
        has_dates=False,
    )
    source = read_memory({"series": rows, "label": range(len(rows))})
    return labels.match_series(source, layout).tolist()


def test_a_series_may_be_numbered_in_either_table():
    eans = [4006381333931, 4006381333932]
    assert series_of_labels([str(ean) for ean in eans], [float(ean) for ean in eans]) == [0, 1]
    assert series_of_labels(["25.0", "7.0"], [7, 25]) == [1, 0]
    assert series_of_labels(["007", "7"], ["7", "007"]) == [1, 0]


def test_a_name_that_two_series_may_have_is_refused():
    names = ["train/x.csv", "test/x.csv", "y.csv"]
    assert series_of_labels(names, ["test/x.csv", "y", "train/x"]) == [1, 2, 0]
    with pytest.raises(UserError, match=r'"x" may be train/x.csv or test/x.csv; write the whole'):
        series_of_labels(names, ["y", "x"])


def test_the_fraction_of_a_number_is_no_ending():
    with pytest.raises(UserError, match='there is no series "1"'):
        series_of_labels(["1.5", "1.6"], ["1"])
