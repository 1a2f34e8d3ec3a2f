from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from slipstream.scoring import baselines
from slipstream.training import train
from tests.conftest import close, merged, mostly_slow, real_file, small_config, small_dataset, waves
from tests.labelled import CLASSIFY, states
from tests.limits import FaultyDevice

generator = torch.Generator().manual_seed(0)
PAST = torch.randn(12, 5, 2, generator=generator)


def test_repeat_is_the_last_row():
    found = baselines.predict_repeat(PAST, 3)
    for window in range(5):
        for step in range(3):
            assert torch.equal(found[window, step], PAST[-1, window])


@pytest.mark.parametrize("period", [1, 4, 12])
def test_seasonal_is_one_season_ago(period):
    found = baselines.predict_seasonal(PAST, 7, period)
    for step in range(7):
        assert torch.equal(found[:, step], PAST[12 - period + step % period])


@pytest.mark.slow
def test_ridge_reaches_the_known_figure_on_etth1(tmp_path):
    config = small_config(
        tmp_path,
        data={
            "path": str(real_file("ETTh1.csv")),
            "time": "date",
            "channels": "independent",
            "context": 336,
            "horizon": 96,
            "split": {"rows": [8640, 2880, 2880]},
        },
        model={"kind": "linear"},
        train={"epochs": 1, "batch": 1024},
        engine={"threads": 2},
    )
    summary = train(config).summary
    assert summary["windows"] == {"train": 8209, "val": 2785, "test": 2785}
    found = {name: beside["scaled"]["test"] for name, beside in summary["baselines"].items()}
    assert found["ridge"]["mse"] == pytest.approx(0.3702, abs=0.005)
    assert found["ridge"]["mae"] == pytest.approx(0.3914, abs=0.005)
    assert found["repeat"]["mse"] == pytest.approx(1.2944, abs=0.001)


@pytest.mark.parametrize("relative", [False, True])
def test_ridge_solves_the_normal_equations(relative):
    x = torch.randn(4, 300, 2, generator=generator)
    y = torch.randn(300, 3, 2, generator=generator) + x[-1][:, None]
    parts = list(zip(x.split(77, dim=1), y.split(77), strict=True))
    fitted = baselines.fit_ridge(parts, parts, baselines.WindowShape(4, 2, 2), [relative])
    rows = (x - x[-1] if relative else x).transpose(0, 1).flatten(1).double().numpy()
    rows = np.concatenate([rows, np.ones((300, 1))], axis=1)
    wanted = (y - x[-1][:, None] if relative else y).flatten(1).double().numpy()
    penalty = np.diag([fitted.penalty * 300] * (rows.shape[1] - 1) + [1e-9 * fitted.penalty * 300])
    weights = np.linalg.solve(rows.T @ rows + penalty, rows.T @ wanted)
    close(fitted.weights, weights, rel=1e-6)
    found = fitted.predict(x, 3)
    level = x[-1][:, None].double().numpy() if relative else 0
    close(found, (rows @ weights).reshape(300, 3, 2) + level, rel=1e-5)


@pytest.mark.parametrize("future", [0, 1])
@pytest.mark.parametrize("context", [4, 2500])
def test_sums_relative_to_the_last_row_follow_from_those_of_the_rows(context, future):
    x = torch.randn(context, 60, 3, generator=generator).double() + 5
    ahead = [torch.randn(60, 7, 1, generator=generator).double()] if future else []
    batches = [(x, torch.randn(60, 7, 2, generator=generator).double() + 5, *ahead)]
    shape = baselines.WindowShape(context, 3, 2, (7, 1) if future else (0, 0))
    wanted = baselines.RidgeMoments.sum(batches, shape.choose_features(relative=True))
    found = baselines.RidgeMoments.sum(batches, shape.choose_features()).subtract_last(shape)
    assert found.num_windows == wanted.num_windows
    for name in ("xx", "xy", "yy"):
        close(getattr(found, name), getattr(wanted, name), rel=1e-9)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("drift", [0.0, 3.0])
def test_rows_are_relative_to_the_last_one_where_the_level_moves(monkeypatch, drift, wide):
    """Noise about a mean returns to it; a walk stays where it is."""
    if wide:
        monkeypatch.setattr(baselines, "WIDE_INPUTS", 1)

    def draw(count):
        noise = torch.randn(count, 12, generator=generator)
        series = noise.cumsum(dim=1) + drift * torch.arange(count)[:, None] if drift else noise
        return series[:, :8].T[..., None], series[:, 8:, None]

    shape = baselines.WindowShape(8, 1, 1)
    fitted = baselines.fit_ridge([draw(200)], [draw(40)], shape)
    assert fitted.features.relative == bool(drift)


@pytest.mark.parametrize("relative", [False, True])
def test_wide_tables_have_the_same_solution(monkeypatch, relative):
    x = torch.randn(4, 90, 40, generator=generator)
    y = torch.randn(90, 3, 2, generator=generator) + x[-1][:, None, -2:] + 7
    new = torch.randn(4, 20, 40, generator=generator)
    parts = list(zip(x.split(27, dim=1), y.split(27), strict=True))
    asked = (baselines.WindowShape(4, 40, 2), [relative])
    narrow = baselines.fit_ridge(parts, parts[:2], *asked)
    monkeypatch.setattr(baselines, "WIDE_INPUTS", 40)
    wide = baselines.fit_ridge(parts, parts[:2], *asked)
    assert narrow.basis is None
    assert wide.basis is not None
    assert wide.penalty == narrow.penalty
    close(wide.predict(new, 3), narrow.predict(new, 3), rel=1e-5)


def test_features_never_outgrow_the_windows_of_a_wide_table():
    x = torch.randn(8, 30, 3000, generator=generator)
    fitted = baselines.fit_ridge(
        [(x, x[-1:, :, :5].transpose(0, 1))] * 2,
        [(x, x[-1:, :, :5].transpose(0, 1))],
        baselines.WindowShape(8, 3000, 5),
        [False],
    )
    assert fitted.weights.shape == (61, 5)
    close(fitted.predict(x, 1)[:, 0], x[-1, :, :5], rel=1e-2)


def test_the_penalty_is_the_best_on_the_validation_set(monkeypatch):
    def batch(count, noise):
        x = torch.randn(1, count, 40, generator=generator)
        return x, (x[0, :, :1] + noise * torch.randn(count, 1, generator=generator))[:, None]

    few, many = batch(45, 3.0), batch(3000, 0.0)
    asked = (baselines.WindowShape(1, 40, 1), [False])
    chosen = baselines.fit_ridge([few], [many], *asked)

    def error(penalty):
        with monkeypatch.context() as patch:
            patch.setattr(baselines, "RIDGE_PENALTIES", (penalty,))
            one = baselines.fit_ridge([few], [many], *asked)
        return float((one.predict(many[0], 1) - many[1]).square().mean())

    errors = {penalty: error(penalty) for penalty in baselines.RIDGE_PENALTIES}
    assert chosen.penalty == min(errors, key=lambda penalty: errors[penalty])


def test_many_features_are_pooled_and_the_last_row_kept():
    x = torch.randn(5000, 60, 1, generator=generator)
    y = x[-1][:, None]
    fitted = baselines.fit_ridge([(x, y)], [(x, y)], baselines.WindowShape(5000, 1, 1), [False])
    assert fitted.features.pooled == 3
    assert len(fitted.weights) <= baselines.MAX_FEATURES + 3
    assert float((fitted.predict(x, 1) - y).abs().max()) < 0.2


def test_logistic_is_the_penalised_optimum():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    y = (x[:, :1] + torch.randn(300, 2, generator=generator) > 0).long()
    fitted = baselines.fit_logistic([(x, y)], [(x, y)], num_classes=2)
    z = torch.cat([(x - fitted.mean) / fitted.size, torch.ones(300, 1)], dim=1).double()
    likely = (z @ fitted.weights).view(300, 2, 2).softmax(-1)
    errors = (likely - torch.nn.functional.one_hot(y, 2)).flatten(1)
    slope = z.T @ errors / 600 + fitted.penalty * torch.cat(
        [fitted.weights[:-1], torch.zeros(1, 4)]
    )
    assert float(slope.abs().max()) < 1e-4
    assert fitted.penalty == 1e-4  # validated on what it was fitted to, the weakest wins


def test_statistics_are_what_their_names_say():
    rows = torch.tensor([[1.0, 4.0], [3.0, 4.0], [2.0, 4.0]])[:, None]
    found = baselines.compute_statistics(rows, torch.tensor([[9.0]]))[0].view(-1)
    wanted = [2, 4, (2 / 3) ** 0.5, 0, 1, 4, 2, 4, 1, 4, 3, 4, 0.5, 0, 9]
    close(found, wanted, rel=1e-6)
    values = baselines.compute_statistics(rows, None, 3)[0, 14:]
    assert values.tolist() == [1, 3, 2, 4, 4, 4]
    close(baselines.compute_statistics(rows, None, 1)[0, 14:], [2, 4], rel=1e-6)


FOLDS = {
    "expanding": {"walk_forward": 4},
    "rolling": {"walk_forward": 4, "window": "rolling"},
    "embargo": {"walk_forward": 4, "purge": 2, "embargo": 5},
    "many": {"walk_forward": 3, "test": 0.6},
}


def fit_folds(dataset, *, shares):
    """The baselines of every fold, each by itself or after the one before it."""
    work = baselines.FoldWork(dataset) if shares else None
    result = []
    for fold in dataset.folds:
        one = dataset.select_fold(fold)
        load = functools.partial(one.iter_chunks, series=None, rows=0)
        result.append((one, baselines.fit_baselines(one, load, work)))
    return result


@pytest.mark.parametrize("how", FOLDS)
@pytest.mark.parametrize(
    "data",
    [
        {"targets": ["a"]},
        {"channels": "independent"},
        {"targets": ["a"], "inputs": ["b", "c"], "horizon": 0},
        {"targets": ["a"], "future": ["b"]},
    ],
)
def test_folds_share_their_windows_and_not_their_solutions(how, data):
    config = small_config(data={**data, "context": 8, "split": FOLDS[how]})
    dataset = small_dataset(config, waves(600))
    for (one, alone), (_, shared) in zip(
        fit_folds(dataset, shares=False), fit_folds(dataset, shares=True), strict=True
    ):
        starts = one.memory.starts["test"]
        for name, baseline in alone.items():
            if baseline.predict is not None:
                wanted = baseline.predict(one.memory.series, starts)
                close(shared[name].predict(one.memory.series, starts), wanted)


@pytest.mark.parametrize("how", mostly_slow(FOLDS, "expanding"))
def test_folds_of_classes_share_their_windows_and_not_their_solutions(how):
    config = small_config(**merged(CLASSIFY, {"data": {"split": FOLDS[how]}}))
    dataset = small_dataset(config, states(900))
    for (one, alone), (_, shared) in zip(
        fit_folds(dataset, shares=False), fit_folds(dataset, shares=True), strict=True
    ):
        starts = one.memory.starts["test"]
        for name in ("majority", "logistic", "gbm"):
            odds = [
                many[name].predict(one.memory.series, starts).softmax(-1)
                for many in (alone, shared)
            ]
            assert torch.equal(odds[0], odds[1])
            again = baselines.restore_baseline(
                name, "", shared[name].state, dataset.signature
            ).predict(one.memory.series, starts)
            close(again.softmax(-1), odds[1])


def test_windows_that_folds_share_are_summed_once():
    """The work grows with the windows, not with the windows times the folds."""
    config = small_config(data={"targets": ["a"], "context": 8, "split": {"walk_forward": 5}})
    dataset = small_dataset(config, waves(1000))
    seen = []

    def count(name, result):
        is_features = result.dtype == torch.float64 and result.shape[1:] == (3 * 8 + 1,)
        if name == "cat" and is_features:  # the constant is added to the rows of the windows
            seen.append(len(result))

    with FaultyDevice(count):
        fit_folds(dataset, shares=True)
    train = torch.cat([fold.starts["train"] for fold in dataset.folds]).unique()
    assert sum(seen) == len(train) + sum(fold.num_windows["val"] for fold in dataset.folds)
