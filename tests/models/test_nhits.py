"""The mathematics of N-HiTS; what every kind promises is in test_contract.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import slipstream
from slipstream.models.forecaster import build
from slipstream.models.kinds import nhits
from slipstream.models.nhits import pool_rows
from tests.conftest import SMALL, close, merged, small_config, small_dataset, waves


@pytest.mark.parametrize(
    ("count", "rows"), [(6, 96), (3, 7), (1, 5), (1, 1), (4, 4), (21, 336), (84, 333)]
)
def test_coefficients_are_interpolated_as_torch_does(count, rows):
    values = torch.randn(2, 3, count)
    wanted = F.interpolate(values, size=rows, mode="linear", align_corners=False)
    close(values @ torch.from_numpy(nhits.make_interpolation(count, rows)), wanted)


@pytest.mark.parametrize(("length", "rate"), [(12, 4), (10, 4), (3, 16), (7, 1), (1, 4)])
def test_pooling_is_the_mean_of_each_group_of_rows(length, rate):
    rows = torch.randn(2, 3, length)
    pooled, size = pool_rows(rows, rate), min(rate, length)
    assert pooled.shape[-1] == nhits.count_groups(length, rate)
    newest = rows[..., length - size :]
    close(pooled[..., -1], newest.mean(dim=-1))
    close(pooled.sum(dim=-1) * size, rows.sum(dim=-1))  # each row belongs to one group
    close(nhits.pool_rows(rows.numpy(), rate), pooled)


def make_network(**sections):
    config = small_config(**merged({"model": {"kind": "nhits", "layers": 2}}, sections))
    signature = small_dataset(config).signature
    torch.manual_seed(0)
    inputs = torch.randn(signature.context, 5, signature.model_inputs)
    return build(config.model, signature).eval().core, inputs, signature


def test_each_stack_reads_what_the_stacks_before_it_left_and_adds_its_forecast():
    core, inputs, signature = make_network(data={"horizon": 9})
    residual = inputs.permute(1, 2, 0)
    columns, total = signature.model_targets, 0
    for rate, stack, coarse in zip((16, 4), core.stacks, core.coarse, strict=False):
        hidden = residual.unflatten(-1, (-1, rate)).mean(dim=-1).flatten(1)
        for layer in stack.layers:
            hidden = F.relu(layer.weight @ hidden.T + layer.bias[:, None]).T
        spread = {}
        for name, length, width in (("backcast", 16, 3), ("forecast", 9, columns)):
            layer = getattr(coarse, name)
            few = F.linear(hidden, layer.weight, layer.bias).unflatten(-1, (width, -1))
            assert few.shape[-1] == -(-length // rate)
            spread[name] = F.interpolate(few, size=length, mode="linear")
        residual = residual - spread["backcast"]
        total = total + spread["forecast"].transpose(1, 2)
    hidden = residual.flatten(1)
    for layer in core.stacks[2].layers:
        hidden = F.relu(F.linear(hidden, layer.weight, layer.bias))
    head = core.head.linear
    wanted = total + F.linear(hidden, head.weight, head.bias).unflatten(-1, (9, columns))
    with torch.no_grad():
        close(core(inputs, None).unflatten(-1, (9, columns)), wanted.detach())


def test_one_stack_is_an_mlp():
    core, inputs, _ = make_network(model={"stacks": 1})
    mlp, _, _ = make_network(model={"kind": "mlp"})
    first, weights = "stacks.0.layers.", {}
    for name, weight in core.state_dict().items():
        if name == f"{first}0.weight":  # the columns of a row come one after the other in an MLP
            weight = weight.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
        depth, _, end = name.removeprefix(first).partition(".")
        weights[f"body.{3 * int(depth)}.{end}" if name.startswith(first) else name] = weight
    mlp.load_state_dict(weights)
    with torch.no_grad():
        close(core(inputs, None), mlp(inputs, None))


def test_an_estimate_has_one_coefficient_in_every_stack():
    core, inputs, _ = make_network(data={"horizon": 0, "targets": ["c"]})
    assert [coarse.forecast.out_features for coarse in core.coarse] == [1, 1]
    assert core(inputs, None).shape == (5, 1)


def test_a_context_shorter_than_the_coarsest_rate_is_one_group():
    core, inputs, _ = make_network(data={"context": 6}, model={"stacks": 5})
    assert [stack.layers[0].in_features // 3 for stack in core.stacks] == [1, 1, 1, 2, 6]
    out = core(inputs, None)
    assert torch.isfinite(out).all()


def test_the_interpolation_is_no_weight_of_the_file():
    core, _, _ = make_network()
    assert not [name for name in core.state_dict() if "table" in name]


def test_a_search_trains_widths_in_one_pack_and_stacks_in_their_own(tmp_path):
    space = {"model.hidden": [5, 8], "model.stacks": [2, 3]}
    search = {"trials": 4, "retrain": 0, "pruner": "none", "sampler": "grid", "space": space}
    config = merged(SMALL, {"out": str(tmp_path), "model": {"kind": "nhits"}, "tune": search})
    summary = slipstream.tune(merged(config, {"train": {"epochs": 1}}), waves(300)).summary
    assert summary["trials"]["finished"] == 4
    assert summary["packs"] == 2
