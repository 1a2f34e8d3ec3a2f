"""What the folds of a search train on."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from slipstream import UserError
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.search.packs import DatasetCache
from tests.conftest import merged, small_config, waves
from tests.labelled import CLASSIFY, states

SHAPES = {
    "one series": {},
    "minmax": {"scale": "minmax"},
    "series with statics": {"id": "id", "static": ["k"]},
    "independent": {"channels": "independent", "inputs": ["a", "c"]},
    "the first fold of a walk": {"split": {"walk_forward": 2, "purge": 3}},
}


def table(rows=600):
    found = waves(rows).to_pydict()
    found["id"] = [i // (rows // 3) for i in range(rows)]
    found["k"] = [float(i // (rows // 3)) for i in range(rows)]
    return found


def configured(shape, **sections):
    data = {"inputs": ["a", "b", "c"], "targets": ["a", "c"]} | SHAPES[shape]
    return small_config(data=data, tune={"folds": 3}, **sections)


def changed(content, rows, by=1e3):
    """The same table with other values in some rows."""
    copy = dict(content)
    for name in "abc":
        copy[name] = [v * 7 - by if i in rows else v for i, v in enumerate(content[name])]
    return copy


def target_rows(starts, signature, num_rows):
    """Among the rows of the table, whichever copy of them the windows lie in."""
    rows = starts[:, None] + signature.lead + torch.arange(signature.steps_out)
    return set((rows % num_rows).flatten().tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folds_validation_rows_change_no_bit_of_what_it_trains_on(shape):
    config, content = configured(shape), table()
    ready = DatasetCache(config, content).get(config)
    assert len(ready.folds) == 3
    for fold, starts in enumerate(ready.folds):
        rows = target_rows(starts["val"], ready.dataset.signature, 600)
        assert not rows & target_rows(starts["train"], ready.dataset.signature, 600)
        again = DatasetCache(config, changed(content, rows)).get(config)
        assert torch.equal(again.folds[fold]["train"], starts["train"])
        one = windows.gather(ready.series, starts["train"])
        other = windows.gather(again.series, starts["train"])
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert one.static is other.static or torch.equal(one.static, other.static)
        validated = windows.gather(again.series, starts["val"]).targets
        assert not torch.equal(validated, windows.gather(ready.series, starts["val"]).targets)


def test_each_fold_is_scaled_by_its_own_training_rows():
    config = configured("one series")
    ready = DatasetCache(config, table()).get(config)
    column = list(ready.dataset.signature.inputs).index("b")
    for starts in ready.folds:
        last = int(starts["train"].max()) + 20
        mine = ready.series.values[last // 600 * 600 : last, column].double()
        assert float(mine.mean()) == pytest.approx(0, abs=1e-6)
        assert float(mine.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_the_last_fold_is_the_split_itself():
    config = configured("series with statics")
    ready = DatasetCache(config, table()).get(config)
    plain = datasets.load_dataset(config, table())
    assert ready.dataset.scaler == plain.scaler
    for name in ("train", "val"):
        assert torch.equal(ready.folds[-1][name], plain.memory.starts[name])
        one = windows.gather(ready.series, ready.folds[-1][name])
        other = windows.gather(plain.memory.series, plain.memory.starts[name])
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.static, other.static)


def test_a_folds_validation_labels_do_not_weigh_what_it_trains_on():
    sections = {"tune": {"folds": 2}, "train": {"class_weights": "balanced"}}
    config = small_config(**merged(CLASSIFY, sections))
    content = states().to_pydict()
    ready = DatasetCache(config, pa.table(content)).get(config)
    num_rows = len(content["state"])
    rows = target_rows(ready.folds[0]["val"], ready.dataset.signature, num_rows)
    names = sorted(set(content["state"]))
    content["state"] = [names[0] if i in rows else v for i, v in enumerate(content["state"])]
    again = DatasetCache(config, pa.table(content)).get(config)
    weights = [one.resolve_settings(config).train.class_weights for one in (ready, again)]
    assert weights[0] == weights[1] != "balanced"


def test_a_column_that_one_fold_cannot_scale_is_said_with_the_fold():
    config, content = configured("one series"), table()
    content["b"] = [3.0 if i < 350 else v for i, v in enumerate(content["b"])]
    with pytest.raises(UserError, match=r'tune.folds = 3, fold 1: column "b" is 3 in every'):
        DatasetCache(config, content).get(config)


def test_the_folds_of_a_walk_change_no_bit_of_what_they_train_on():
    data = {"inputs": ["a", "b", "c"], "targets": ["a", "c"], "split": {"walk_forward": 3}}
    config, content = small_config(data=data), table()
    dataset = datasets.load_dataset(config, content)
    for number, fold in enumerate(dataset.folds):
        for which in ("val", "test"):
            rows = target_rows(fold.starts[which], dataset.signature, 600)
            again = datasets.load_dataset(config, changed(content, rows))
            starts = fold.starts["train"]
            assert torch.equal(again.folds[number].starts["train"], starts)
            one = windows.gather(dataset.memory.series, starts)
            other = windows.gather(again.memory.series, starts)
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
