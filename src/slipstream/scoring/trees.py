"""Gradient-boosted trees: fitting by scikit-learn, in this process or in one beside it.

Without torch, which a process that only fits trees does not need. `boosting` makes features of
windows and predicts with the trees. Shapes: N windows, D features, K outputs, M trees, L leaves.
"""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import slipstream
from slipstream.base.machine import count_available_cores

Array = npt.NDArray[Any]
FittedModel = tuple[Any, list[int]]
"""A model of scikit-learn, and the outputs that the trees of each iteration add to"""

MAX_LEAVES = 15
"""Leaves of a tree: as exact as 31 on the sets that were tried, at half the work"""
MIN_LEAF_ROWS, FEWEST_LEAF_ROWS = 20, 3
MAX_BINS = 127
PATIENCE = 10
"""Trees without an improvement on the validation windows, after which no more are added"""
MIN_THREADED_NUMBERS = 400_000
"""Features times windows from which on several threads fit the trees"""
MANY_CORES = 8
"""From which on a thread that waits may keep its core; below, it leaves it to the training, which
takes 1.3 to 1.6 times as long with two threads"""
MIN_PROBABILITY = 1e-7
"""The probability of a class without training windows"""


@dataclass(frozen=True)
class TreeTask:
    """The windows that trees are fitted to, and how many trees."""

    x: Array
    """[N, D] float32"""
    y: Array
    """[N, K]: float32 numbers, or int64 classes"""
    x_val: Array
    y_val: Array
    num_classes: int
    """0 for numbers"""
    max_trees: int
    """For each output, and of classes for each class"""
    rate: float

    def to_arrays(self) -> dict[str, Array]:
        """Return all fields as arrays."""
        return {name: np.asarray(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> TreeTask:
        values = [arrays[name] for name in cls.__dataclass_fields__]
        x, y, x_val, y_val, num_classes, max_trees, rate = values
        return cls(x, y, x_val, y_val, int(num_classes), int(max_trees), float(rate))


def fit_trees(task: TreeTask, threads: int) -> dict[str, Array]:
    """Return trees as arrays, their number the first axis.

    A tree is its splits (`feature`, `threshold`: left where the feature is at most that), the paths
    to its leaves (`path`: 1 where a leaf is on the left of a split, -1 on the right, 0 elsewhere;
    `lefts`: the number of splits on whose left it is), the leaves' `value` and the `output` that it
    adds to. `level` has the outputs' constants, [K], or of classes [K * Q].
    """
    fit = _fit_classes if task.num_classes else _fit_numbers
    if len(task.x) < 2 * FEWEST_LEAF_ROWS:  # too few for any split; spares importing scikit-learn
        level, _ = fit(task, None)
        return _join_trees([], level)
    from sklearn import ensemble  # takes a second
    from threadpoolctl import threadpool_limits

    # on a busy machine, the threads of a small task spend most of their time waiting
    threads = threads if task.x.size >= MIN_THREADED_NUMBERS else 1
    with threadpool_limits(threads, user_api="openmp"):
        level, models = fit(task, ensemble)
    trees = [
        (predictor.nodes, output)
        for model, outputs in models
        for iteration in model._predictors
        for predictor, output in zip(iteration, outputs, strict=True)
    ]
    return _join_trees(trees, level)


def _choose_leaf_rows(num_rows: int) -> int:
    """Return the fewest rows of a leaf: a tenth where there are few, since larger leaves leave a
    small table with hardly a split."""
    return min(max(num_rows // 10, FEWEST_LEAF_ROWS), MIN_LEAF_ROWS)


def _make_settings(task: TreeTask) -> dict[str, Any]:
    return {
        "max_iter": task.max_trees,
        "learning_rate": task.rate,
        "max_leaf_nodes": MAX_LEAVES,
        "min_samples_leaf": _choose_leaf_rows(len(task.x)),
        "max_bins": MAX_BINS,
        "early_stopping": len(task.x_val) > 0,
        "n_iter_no_change": PATIENCE,
        "random_state": 0,
    }


def _fit_numbers(task: TreeTask, ensemble: Any) -> tuple[Array, list[FittedModel]]:
    """Return the outputs' constants and a model per output; without scikit-learn's `ensemble`, no
    models."""
    level, models = task.y.mean(axis=0, dtype=np.float64), []
    for output in range(task.y.shape[1] if ensemble else 0):
        model = ensemble.HistGradientBoostingRegressor(**_make_settings(task))
        validation = {}
        if len(task.x_val):
            validation = {"X_val": task.x_val, "y_val": task.y_val[:, output]}
        model.fit(task.x, task.y[:, output], **validation)
        level[output] = float(np.ravel(model._baseline_prediction)[0])
        models.append((model, [output]))
    return level, models


def _fit_classes(task: TreeTask, ensemble: Any) -> tuple[Array, list[FittedModel]]:
    """Return the constants of each row's classes and a model per predicted row; without
    scikit-learn's `ensemble`, no models."""
    count, models = task.num_classes, []
    level = np.empty((task.y.shape[1], count))
    for row in range(task.y.shape[1]):
        labels = task.y[:, row]
        shares = np.bincount(labels, minlength=count) / len(labels)
        level[row] = np.log(np.maximum(shares, MIN_PROBABILITY))
        seen = np.flatnonzero(shares)
        if ensemble is None or len(seen) == 1:
            continue
        model = ensemble.HistGradientBoostingClassifier(**_make_settings(task))
        known = np.isin(task.y_val[:, row], seen)  # scikit-learn refuses others
        validation = {}
        if known.any():
            validation = {"X_val": task.x_val[known], "y_val": task.y_val[known, row]}
        elif len(task.x_val):
            model.set_params(early_stopping=False)
        model.fit(task.x, labels, **validation)
        constants = np.ravel(model._baseline_prediction)
        if len(seen) == 2:  # scikit-learn has trees of the second of two classes alone
            level[row, seen] = 0.0, constants[0]
            seen = seen[1:]
        else:
            level[row, seen] = constants
        models.append((model, [row * count + int(number) for number in seen]))
    return level.ravel(), models


def _join_trees(trees: Sequence[tuple[Any, int]], level: Array) -> dict[str, Array]:
    """Return trees, each its nodes and its output, in the form of `fit_trees`."""
    splits = MAX_LEAVES - 1
    arrays: dict[str, Array] = {
        "feature": np.zeros((len(trees), splits), np.int32),
        # splits that a tree does not have are on no path
        "threshold": np.zeros((len(trees), splits), np.float32),
        "path": np.zeros((len(trees), splits, MAX_LEAVES), np.int8),
        # a leaf that a tree does not have is never reached
        "lefts": np.full((len(trees), MAX_LEAVES), -1, np.int8),
        "value": np.zeros((len(trees), MAX_LEAVES), np.float32),
        "output": np.array([output for _, output in trees], np.int64),
        "level": np.asarray(level, np.float64),
    }
    for number, (nodes, _) in enumerate(trees):
        _add_tree(
            {name: values[number] for name, values in arrays.items() if name != "level"}, nodes
        )
    return arrays


def _add_tree(arrays: Mapping[str, Array], nodes: Any) -> None:
    """Write the splits and leaves of a tree into its arrays."""
    num_splits = num_leaves = 0
    waiting: list[tuple[int, list[tuple[int, int]]]] = [(0, [])]
    while waiting:
        place, path = waiting.pop()
        node = nodes[place]
        if node["is_leaf"]:
            for split, side in path:
                arrays["path"][split, num_leaves] = side
            arrays["lefts"][num_leaves] = sum(side > 0 for _, side in path)
            arrays["value"][num_leaves] = node["value"]
            num_leaves += 1
            continue
        arrays["feature"][num_splits] = node["feature_idx"]
        threshold = np.float32(node["num_threshold"])
        if float(threshold) > node["num_threshold"]:  # the largest float32 that is not above it
            threshold = np.nextafter(threshold, np.float32(-np.inf))
        arrays["threshold"][num_splits] = threshold
        waiting += [
            (int(node["left"]), [*path, (num_splits, 1)]),
            (int(node["right"]), [*path, (num_splits, -1)]),
        ]
        num_splits += 1


class TreeProcess:
    """A process that fits trees, task after task, while this one does something else. It imports
    scikit-learn, which takes a second or two, while it waits for the tasks."""

    def __init__(self) -> None:
        self._result: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        paths = [str(Path(slipstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        changes = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if count_available_cores() < MANY_CORES:
            changes["OMP_WAIT_POLICY"] = "passive"
        self._process = subprocess.Popen(
            # -P: modules in the working directory are not imported
            (sys.executable, "-P", "-m", "slipstream.scoring.trees"),
            stdin=subprocess.PIPE,
            stdout=self._result,
            stderr=subprocess.DEVNULL,
            env=os.environ | changes,
            start_new_session=True,  # Ctrl-C is for the training; this ends by itself
        )

    def fit(self, tasks: Sequence[TreeTask], threads: int) -> list[dict[str, Array]] | None:
        """Wait for the trees of each task; None where the process has failed."""
        arrays: dict[str, Any] = {
            f"{number}/{name}": array
            for number, task in enumerate(tasks)
            for name, array in task.to_arrays().items()
        }
        assert self._process.stdin is not None
        with self._result:
            try:
                with self._process.stdin as source:
                    np.savez(source, threads=threads, **arrays)
            except BrokenPipeError:  # it has ended
                pass
            if self._process.wait() != 0:
                return None
            self._result.seek(0)
            return _split_tasks(np.load(self._result))

    def close(self) -> None:
        """End the process, which has no tasks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._result.close()


_prepared: list[TreeProcess] = []
"""A process that was started before it is known whether there will be tasks"""


def prepare_process() -> None:
    """Start a process for the tasks that may come; `take_process` returns it."""
    _prepared.append(TreeProcess())


def take_process() -> TreeProcess:
    """Return the process that was started before, or a new one."""
    return _prepared.pop() if _prepared else TreeProcess()


def _split_tasks(archive: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the arrays of each task, whose number their names begin with."""
    tasks: dict[int, dict[str, Array]] = {}
    for name in archive:
        number, _, rest = name.partition("/")
        tasks.setdefault(int(number), {})[rest] = archive[name]
    return [tasks[number] for number in sorted(tasks)]


def main() -> None:
    """Read tasks from standard input and write their trees to standard output; nothing without
    tasks."""
    importing = threading.Thread(target=_import_scikit_learn, daemon=True)
    importing.start()
    content = sys.stdin.buffer.read()
    if not content:
        os._exit(0)  # without waiting for the import
    importing.join()
    archive = dict(np.load(io.BytesIO(content)))
    threads = int(archive.pop("threads"))
    results = [fit_trees(TreeTask.from_arrays(task), threads) for task in _split_tasks(archive)]
    arrays: dict[str, Any] = {
        f"{number}/{name}": array
        for number, result in enumerate(results)
        for name, array in result.items()
    }
    written = io.BytesIO()
    np.savez(written, **arrays)
    sys.stdout.buffer.write(written.getvalue())


def _import_scikit_learn() -> None:
    with suppress(ImportError):  # who needs it raises it again
        importlib.import_module("sklearn.ensemble")
        importlib.import_module("threadpoolctl")


if __name__ == "__main__":
    main()
