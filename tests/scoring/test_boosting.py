from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from slipstream.models import boosting as boosting_network
from slipstream.scoring import baselines, boosting, trees
from tests.conftest import close, merged, small_config, small_dataset, waves
from tests.labelled import CLASSIFY, states


def make_task(*, classes: int = 0, outputs: int = 1, rows: int = 400) -> trees.TreeTask:
    numbers = np.random.default_rng(0)
    x, x_val = (numbers.normal(size=(count, 5)).astype(np.float32) for count in (rows, 100))
    if classes:
        make = lambda x: np.stack(  # noqa: E731
            [
                np.digitize(x[:, k] + x[:, k + 1], np.linspace(-1, 1, classes - 1))
                for k in range(outputs)
            ],
            1,
        )
    else:
        make = lambda x: np.stack([np.sin(3 * x[:, k]) + x[:, k + 1] for k in range(outputs)], 1)  # noqa: E731
    dtype = np.int64 if classes else np.float32
    y, y_val = (make(values).astype(dtype) for values in (x, x_val))
    return trees.TreeTask(x, y, x_val, y_val, classes, 30, 0.1)


def restore(fitted: dict[str, np.ndarray], outputs: int) -> boosting.Boosting:
    tensors = {name: torch.from_numpy(values) for name, values in fitted.items()}
    eye = torch.eye(outputs, dtype=torch.float64)
    return boosting.Boosting((), torch.arange(0), (0.0,) * 4, 0, 0, eye, eye[0] * 0, tensors)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a small fit would wait for one another most of the time."""
    with threadpool_limits(1, user_api="openmp"):
        yield


SETTINGS = {
    "max_iter": 30,
    "learning_rate": 0.1,
    "max_leaf_nodes": trees.MAX_LEAVES,
    "max_bins": trees.MAX_BINS,
    "min_samples_leaf": trees.MIN_LEAF_ROWS,
    "random_state": 0,
    "early_stopping": True,
    "n_iter_no_change": trees.PATIENCE,
}


@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_trees_predict_what_scikit_learn_predicts(monkeypatch, block):
    monkeypatch.setattr(boosting_network, "TREES_AT_ONCE", block)
    task = make_task(outputs=2)
    found = restore(trees.fit_trees(task, 1), 2).predict_outputs(torch.from_numpy(task.x_val))
    for output in range(2):
        model = HistGradientBoostingRegressor(**SETTINGS).fit(
            task.x, task.y[:, output], X_val=task.x_val, y_val=task.y_val[:, output]
        )
        assert model.n_iter_ > 5
        close(found[:, output], model.predict(task.x_val), rel=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_trees_of_classes_have_the_probabilities_of_scikit_learn(classes):
    task = make_task(classes=classes, outputs=2)
    found = restore(trees.fit_trees(task, 1), 2).predict_outputs(torch.from_numpy(task.x_val))
    for row in range(2):
        model = HistGradientBoostingClassifier(**SETTINGS).fit(
            task.x, task.y[:, row], X_val=task.x_val, y_val=task.y_val[:, row]
        )
        likely = found.view(-1, 2, classes)[:, row].softmax(-1)
        close(likely, model.predict_proba(task.x_val), rel=1e-5)


def test_a_class_without_training_windows_is_unlikely_and_no_error():
    task = make_task(classes=3)
    y, y_val = np.minimum(task.y, 1), task.y_val
    assert set(np.unique(y_val)) == {0, 1, 2}
    rare = trees.TreeTask(task.x, y, task.x_val, y_val, 3, 10, 0.1)
    found = restore(trees.fit_trees(rare, 1), 1).predict_outputs(torch.from_numpy(task.x_val))
    likely = found.softmax(-1)
    assert float(likely[:, 2].max()) < 1e-4
    assert float(((likely[:, 1] > 0.5).numpy() == (y_val[:, 0] > 0))[y_val[:, 0] < 2].mean()) > 0.8


def test_a_process_beside_the_training_fits_the_same_trees():
    tasks = [make_task(outputs=2), make_task(classes=3)]
    trees.prepare_process()
    process = trees.take_process()
    (another := trees.take_process()).close()  # one that is started now
    assert another is not process
    found = process.fit(tasks, 1)
    for task, fitted in zip(tasks, found, strict=True):
        wanted = trees.fit_trees(task, 1)
        assert fitted.keys() == wanted.keys()
        for name, values in wanted.items():
            assert np.array_equal(fitted[name], values), name


def test_a_process_without_tasks_ends():
    process = trees.TreeProcess()
    process.close()
    assert process._process.returncode == 0


def test_a_process_that_has_failed_leaves_no_trees():
    process = trees.TreeProcess()
    process._process.kill()
    process._process.wait()
    assert process.fit([make_task()], 1) is None


def test_few_windows_need_no_scikit_learn():
    task = make_task(rows=5)
    code = (
        "import sys, numpy as np; from slipstream.scoring import trees; a = np.ones((5, 2), 'f4');"
        "r = trees.fit_trees(trees.TreeTask(a, a, a, a, 0, 9, 0.1), 1); "
        "assert r['level'].tolist() == [1, 1] and not len(r['output']); "
        "assert not {'sklearn', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    found = restore(trees.fit_trees(task, 1), 1).predict_outputs(torch.from_numpy(task.x_val))
    close(found[:, 0], np.full(100, task.y.mean()), rel=1e-5)


@pytest.mark.parametrize(("rows", "leaf"), [(30, 3), (120, 12)])
def test_a_leaf_has_a_tenth_of_few_rows(rows, leaf):
    x = np.arange(rows, dtype=np.float32)[:, None]
    y = (x[:, 0] < leaf).astype(np.float32)[:, None]  # the best split leaves the fewest rows
    task = trees.TreeTask(x, y, x[:0], y[:0], 0, 200, 0.3)
    found = restore(trees.fit_trees(task, 1), 1).predict_outputs(torch.from_numpy(x))
    assert float(np.abs(found.numpy() - y).max()) < 1e-3
    rare = (x[:, 0] < leaf - 1).astype(np.float32)[:, None]
    found = restore(trees.fit_trees(replace(task, y=rare), 1), 1)
    assert float(found.predict_outputs(torch.from_numpy(x[leaf - 1 : leaf]))[0, 0]) > 0.01


def test_importing_the_library_does_not_import_scikit_learn():
    code = (
        "import sys, slipstream, slipstream.cli, slipstream.scoring.baselines, "
        "slipstream.training.run; assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def fit_gbm(config, table):
    dataset = small_dataset(config, table)
    load = functools.partial(dataset.iter_chunks, series=None, rows=0)
    return dataset, baselines.fit_baselines(dataset, load)["gbm"]


FORECAST = {"context": 24, "horizon": 3}


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ({**FORECAST, "targets": ["a"]}, 1500),
        ({**FORECAST, "channels": "independent"}, 700),
        ({**FORECAST, "horizon": 30}, 900),
        ({**FORECAST, "targets": ["a"], "future": ["b"]}, 900),
        ({"context": 12, "horizon": 0, "targets": ["a"], "inputs": ["b", "c"]}, 900),
        ({"context": 1, "horizon": 1, "targets": ["a"]}, 900),
        ({**FORECAST, "targets": ["a"], "inputs": ["b", "c"]}, 900),
    ],
)
def test_trees_learn_from_every_kind_of_window(data, rows):
    dataset, gbm = fit_gbm(small_config(data=data), waves(rows))
    series, starts = dataset.memory.series, dataset.memory.starts["train"]
    found = gbm.predict(series, starts)
    again = baselines.restore_baseline("gbm", "", gbm.state, dataset.signature)
    assert torch.equal(again.predict(series, starts), found)
    sequences = dataset.signature.sequences_per_window
    assert found.shape[0] == len(starts) * sequences
    truth = series.targets[starts[:, None] + series.target_rows]
    if sequences > 1:
        truth = truth.transpose(1, 2).flatten(0, 1)[..., None]
    assert found.shape == (*truth.shape, 1)
    mean = truth.mean(dim=0)
    assert float((found[..., 0] - truth).square().mean()) < 0.95 * float(
        (truth - mean).square().mean()
    )


def test_predicted_rows_between_those_with_trees_are_interpolated():
    weights = boosting._interpolate(7, 4)
    close(weights.sum(dim=0), np.ones(7))
    close(weights.T @ torch.tensor([0.0, 2.0, 4.0, 6.0]).double(), np.arange(7.0), rel=1e-12)
    assert boosting._interpolate(1, 1).tolist() == [[1.0]]


def test_trees_classify():
    config = small_config(**merged(CLASSIFY, {}))
    dataset, gbm = fit_gbm(config, states(900))
    series, starts = dataset.memory.series, dataset.memory.starts["train"]
    found = gbm.predict(series, starts)
    truth = series.targets[starts[:, None] + series.target_rows][..., 0].long()
    assert found.shape == (*truth.shape, 1, len(dataset.signature.classes))
    share = float((found[:, :, 0].argmax(-1) == truth).double().mean())
    majority = float((truth == truth.flatten().mode().values).double().mean())
    assert share > majority + 0.1


def test_components_are_the_same_from_both_products(monkeypatch):
    rest = torch.randn(60, 80, generator=torch.Generator().manual_seed(0)).double()
    rest = rest * torch.arange(1, 81)
    mean, basis = boosting._find_components(rest, 3)
    monkeypatch.setattr(boosting, "MAX_COVARIANCE", 70)
    other_mean, other = boosting._find_components(rest, 3)
    close(other_mean, mean)
    close((other @ basis.T).abs(), np.eye(3), rel=1e-6)


def test_a_wide_table_keeps_the_inputs_that_tell_most(monkeypatch):
    monkeypatch.setattr(boosting, "MAX_FEATURES", 2)
    table = waves(600).to_pydict()
    noise = np.random.default_rng(0)
    table |= {f"n{i}": noise.normal(size=600).tolist() for i in range(4)}
    table["d"] = [2 * value for value in table["a"]]
    inputs = ["n0", "b", "n1", "d", "n2", "n3"]
    data = {"context": 4, "horizon": 0, "targets": ["a"], "inputs": inputs}
    dataset, gbm = fit_gbm(small_config(data=data), table)
    assert "d" in [dataset.signature.inputs[i] for i in gbm.state["columns"].tolist()]
    assert len(gbm.state["columns"]) == 2


def test_trees_see_fewer_windows_where_all_would_take_too_long(monkeypatch):
    monkeypatch.setattr(boosting, "WORK_S", 1e-9)
    monkeypatch.setattr(boosting, "EVAL_BATCH", 100)
    _, gbm = fit_gbm(small_config(data={"context": 8, "horizon": 0, "targets": ["a"]}), waves(1000))
    assert "one training window in" in gbm.description
