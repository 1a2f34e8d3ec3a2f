"""A series as one window (`data.context = "all"`), and splits by patterns and shares of series."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.base.errors import UserError
from slipstream.config import ALL_ROWS, Config, Data, load
from slipstream.data.dataset import Dataset, load_dataset
from slipstream.data.loading import resolve_context
from slipstream.inference.rows import read_new_rows

Table = dict[str, Any]


def make_cases(lengths: list[int], *, labels: str = "every") -> Table:
    """Return a long table of series with one class each: on every row, or on the last."""
    names = np.repeat([f"s{i}" for i in range(len(lengths))], lengths)
    classes = np.repeat([str(i % 2) for i in range(len(lengths))], lengths).astype(object)
    if labels == "last":
        ends = np.cumsum(lengths) - 1
        classes = np.where(np.isin(np.arange(len(classes)), ends), classes, None)
    values = np.random.default_rng(0).normal(size=len(names)) + np.arange(len(names)) % 5
    return {"name": names, "x": values, "label": classes.tolist()}


def load_all(table: Table, **data: Any) -> tuple[Config, Dataset]:
    settings = {"id": "name", "task": "classify", "targets": ["label"], "context": "all"} | data
    config = resolve_context(load({"data": settings}), table)
    return config, load_dataset(config, table)


def test_all_is_a_setting_that_survives_a_round_trip() -> None:
    data = Data(context="all", horizon=0, targets=["y"])

    assert data.context == ALL_ROWS
    assert data.model_dump()["context"] == "all"
    assert Data.model_validate(data.model_dump()).context == ALL_ROWS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 0}, "greater than or equal to 1"),
        ({"context": "every"}, "integer"),
        ({"context": "all", "horizon": 3}, "nothing to forecast"),
        ({"context": "all", "split": {"walk_forward": 2}}, "would cut"),
        ({"context": "all", "prepare": [{"step": "pad"}]}, "pads series itself"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Data(**{"horizon": 0, "targets": ["y"]} | settings)


@pytest.mark.parametrize("labels", ["every", "last"])
def test_each_series_is_one_window(labels: str) -> None:
    config, dataset = load_all(make_cases([12] * 40, labels=labels))

    assert config.data.context == 12
    assert config.data.prepare == ()
    assert dataset.num_windows == {"train": 28, "val": 4, "test": 8}
    assert dataset.count_classes().tolist() == [14, 14]


@pytest.mark.parametrize("labels", ["every", "last"])
def test_shorter_series_are_padded_at_the_front(labels: str) -> None:
    lengths = [5 + i % 8 for i in range(40)]

    config, dataset = load_all(make_cases(lengths, labels=labels))

    assert config.data.context == 12
    assert sum(dataset.num_windows.values()) == 40
    assert dataset.index.padding is not None
    np.testing.assert_array_equal(dataset.index.padding, 12 - np.array(lengths))
    assert dataset.memory is not None
    values = dataset.memory.series.values[:, 0].numpy().reshape(40, 12)
    np.testing.assert_array_equal(values[0, :8], np.full(8, values[0, 7]))


def test_a_number_per_series_is_estimated_from_all_of_its_rows() -> None:
    table = make_cases([10] * 30)
    table["target"] = np.repeat(np.arange(30.0), 10)
    del table["label"]

    config, dataset = load_all(table, task="regress", targets=["target"], horizon=0)

    assert config.data.context == 10
    assert dataset.num_windows == {"train": 21, "val": 3, "test": 6}


def test_new_series_of_any_length_are_one_window_each() -> None:
    config, dataset = load_all(make_cases([6 + i % 3 for i in range(40)]))
    new = make_cases([3, 8, 20])

    rows = read_new_rows(config, dataset.signature, dataset.scaler, new)

    assert len(rows.starts) == 3
    last = [2, 10, 30]  # the rows of the table that series end with
    ends = rows.inputs[rows.starts + config.data.context - 1, 0]
    np.testing.assert_allclose(ends, new["x"][last])


def test_patches_cover_a_window_of_all_rows() -> None:
    table = make_cases([10] * 30)
    settings = {"id": "name", "task": "classify", "targets": ["label"], "context": "all"}

    config = resolve_context(
        load({"data": settings, "model": {"kind": "transformer", "patch": 4}}), table
    )

    assert config.data.context == 12


def load_split(split: dict[str, Any], names: list[str]) -> Dataset:
    table = {
        "name": np.repeat(names, 10),
        "x": np.random.default_rng(0).normal(size=10 * len(names)),
    }
    data = {"id": "name", "context": 4, "horizon": 2, "split": split}
    return load_dataset(load({"data": data}), table)


NAMES = ["25degC_US06", "25degC_UDDS", "0degC_US06", "0degC_Mixed", "10degC_LA92"]


def test_patterns_name_the_series_of_a_set() -> None:
    split = {"by": "series", "val": ["10degC*"], "test": ["*US06*"]}

    dataset = load_split(split, NAMES)

    assert dataset.num_windows == {"train": 10, "val": 5, "test": 10}


def test_a_name_wins_over_a_pattern() -> None:
    split = {"by": "name", "val": ["0degC_US06"], "test": ["*US06*"]}

    assert load_split(split, NAMES).num_windows == {"train": 15, "val": 5, "test": 5}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"val": ["*HWFET*"], "test": ["*US06*"]}, "no value that matches it.*25degC_US06"),
        ({"val": ["25*"], "test": ["*US06*"]}, '"25degC_US06" is in both val and test'),
        ({"val": ["25degC_US6"], "test": ["0*"]}, 'did you mean "25degC_US06"'),
    ],
)
def test_patterns_that_fit_nothing_or_twice_are_refused(
    split: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_split({"by": "series", **split}, NAMES)


def test_fractions_are_shares_of_the_series() -> None:
    names = [f"s{i}" for i in range(50)]

    dataset = load_split({"by": "series", "val": 0.1, "test": 0.2}, names)
    again = load_split({"by": "series", "val": 0.1, "test": 0.2}, names)
    less = load_split({"by": "series", "train": 0.5, "val": 0.1, "test": ["s1*"]}, names)

    assert dataset.num_windows == {"train": 175, "val": 25, "test": 50}
    assert dataset.compute_fingerprint() == again.compute_fingerprint()
    assert less.num_windows == {"train": 100, "val": 20, "test": 55}  # of 39 series


def test_a_share_of_the_training_files_series_validates(tmp_path: Path) -> None:
    for name, count in {"X_TRAIN.ts": 20, "X_TEST.ts": 10}.items():
        cases = "".join(f"{i},{i + 1},{i + 2}:{'ab'[i // 10]}\n" for i in range(count))
        (tmp_path / name).write_text(f"@classLabel true a b\n@data\n{cases}")
    paths = [str(tmp_path / "X_TRAIN.ts"), str(tmp_path / "X_TEST.ts")]
    data = {"path": paths, "task": "classify", "targets": ["label"], "context": "all"}
    data["split"] = {"by": "file", "val": 0.2, "test": ["*_TEST*"]}

    config = resolve_context(load({"data": data}))
    dataset = load_dataset(config)

    assert config.data.layout == "wide"
    assert dataset.num_windows == {"train": 16, "val": 4, "test": 10}
    assert dataset.count_classes("val").tolist() == [2, 2]
