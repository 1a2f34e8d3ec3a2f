from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.events import Epoch, Exploit
from slipstream.reporting.plots.training import (
    describe_curves,
    draw_lane_losses,
    draw_loss_curves,
    draw_losses,
)


def epochs(train, val, **extra):
    pairs = enumerate(zip(train, val, strict=True), start=1)
    return [
        Epoch(epoch=number, step=number, train_loss=a, val_loss=b, best=True, **extra)
        for number, (a, b) in pairs
    ]


def test_curves_of_several_runs_share_a_chart():
    first = epochs([1.0, 0.5], [0.9, 0.6])
    lanes = [*epochs([1.0], [0.8], lane=0), *epochs([1.0, 0.4], [0.7, 0.3], lane=1)]
    page = draw_loss_curves({"a <b>": first, "lanes": lanes, "none yet": []})
    assert "a &lt;b&gt;" in page
    assert "none yet" in page
    assert page.count("<svg") == 1
    many = {f"run {i}": first for i in range(9)}
    assert "stroke-dasharray" in draw_loss_curves(many)


def test_the_low_rate_of_the_model_is_marked():
    curves = epochs([1.0, 0.5], [0.9, 0.6])
    low = Exploit(epoch=1, step=9, best_epoch=1, best_loss=0.6, epochs=2, lr=1e-5)
    assert "low rate" not in draw_losses(curves, 2, "loss")
    assert "low rate" in draw_losses([*curves, low], 2, "loss")
    lanes = [{"lane": n, "best": n == 1, "best_epoch": 2} for n in range(2)]
    curves = [*epochs([1.0], [0.9], lane=0), *epochs([1.0], [0.9], lane=1)]
    assert "low rate" not in draw_lane_losses([*curves, replace(low, lane=0)], lanes, "loss")
    assert "low rate" in draw_lane_losses([*curves, replace(low, lane=1)], lanes, "loss")


@pytest.mark.parametrize(
    ("train", "val", "remark"),
    [
        ([1.0, 0.5, 0.2], [1.0, 0.6, 0.9], "the validation loss rose by 50 %"),
        ([1.0, 0.3, 0.29], [1.2, 0.9, 0.91], "3.0 times the training loss"),
        ([1.0, 0.6, 0.5], [1.0, 0.7, 0.6], "more epochs may lower it"),
        ([1.0, 0.6, 0.59], [1.0, 0.6, 0.61], ""),
        ([1.0], [1.0], ""),
    ],
)
def test_curves_that_part_get_a_remark(train, val, remark):
    said = describe_curves(epochs(train, val))
    assert remark in said
    assert bool(remark) == bool(said)
