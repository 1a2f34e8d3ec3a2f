"""What every model promises."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from slipstream.config.model import SPECS
from slipstream.data import windows
from slipstream.engine import optim
from slipstream.models.forecaster import build, has_dropout
from slipstream.models.losses import compute_window_losses
from slipstream.models.noise import Noise
from slipstream.models.transformer import run_layer
from tests.conftest import KINDS, close, small_config, small_dataset, waves

VARIANTS = {
    "plain": {},
    "two layers": {"model": {"hidden": [8, 6], "layers": 2, "dropout": 0.3}},
    "mean": {"model": {"pool": "mean"}},
    "attention": {"model": {"pool": "attention"}},
    "flatten": {"model": {"pool": "flatten"}},
    "patches": {"model": {"patch": 4}},
    "last": {"model": {"normalize": "last"}},
    "window": {"model": {"normalize": "window"}},
    "bidirectional": {"model": {"bidirectional": True}},
    "layer norm": {"model": {"layer_norm": True, "bidirectional": True, "layers": 2}},
    "sinusoidal": {"model": {"positions": "sinusoidal"}},
    "quantiles": {"train": {"loss": "quantile"}},
    "independent": {"data": {"channels": "independent"}, "model": {"normalize": "last"}},
    "estimate": {"data": {"horizon": 0, "targets": ["c"]}},
    "partly shared": {"data": {"inputs": ["a", "b"], "targets": ["b", "c"]}},
    "static": {"data": {"static": ["k"], "id": "id"}},
    "future": {"data": {"future": ["a"], "static": ["k"], "id": "id"}},
    "future of windows": {"data": {"future": ["a", "c"]}, "model": {"normalize": "window"}},
    "future of channels": {
        "data": {"future": ["a"], "channels": "independent"},
        "model": {"normalize": "last"},
    },
}


def variant(kind, name):
    sections = {key: dict(value) for key, value in VARIANTS[name].items()}
    sections["model"] = {**sections.get("model", {}), "kind": kind}
    if SPECS[kind].has_one_width and isinstance(sections["model"].get("hidden"), list):
        sections["model"] |= {"hidden": 8, "layers": 2}
    if sections["model"].get("bidirectional") and not SPECS[kind].is_recurrent:
        pytest.skip("only recurrent models read both ways, or choose to normalize layers")
    config = small_config(**sections)
    table = waves(200).to_pydict()
    table["id"], table["k"] = [0] * 100 + [1] * 100, [0.5] * 100 + [1.5] * 100
    if "static" not in sections.get("data", {}):
        del table["id"], table["k"]
    return config, small_dataset(config, table)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=VARIANTS)
def made(kind, request):
    config, dataset = variant(kind, request.param)
    torch.manual_seed(0)
    return config, dataset, build(config.model, dataset.signature)


def test_shape_gradient_and_finite_loss(made):
    config, dataset, model = made
    batch = windows.gather(dataset.memory.series, dataset.memory.starts["train"][:5])
    out = model(batch.inputs, batch.static)
    assert out.shape == (*batch.targets.shape, max(len(dataset.signature.quantiles), 1))
    assert out.dtype == torch.float32
    compute_window_losses(out, batch.targets, config.train).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if not name.endswith("in_proj_bias") and "norm" not in name:
            assert parameter.grad.abs().sum() > 0, f"no gradient reaches {name}"


def test_windows_do_not_see_each_other(made):
    _, dataset, model = made
    model.eval()
    starts = dataset.memory.starts["train"][:6]
    together = model(*windows.gather_inputs(dataset.memory.series, starts))
    alone = [model(*windows.gather_inputs(dataset.memory.series, one[None])) for one in starts]
    close(together.detach(), torch.cat(alone).detach())


def test_weights_survive_their_file(made):
    config, dataset, model = made
    model.eval()
    other = build(config.model, dataset.signature).eval()
    other.load_state_dict(load(save(model.state_dict())))
    given = windows.gather_inputs(dataset.memory.series, dataset.memory.starts["test"][:4])
    assert torch.equal(model(*given), other(*given))


def test_dropout_comes_with_noise_alone(kind):
    config, dataset = variant(kind, "two layers")
    model = build(config.model, dataset.signature).train()
    given = windows.gather_inputs(dataset.memory.series, dataset.memory.starts["train"][:4])
    seed = Noise(torch.tensor(0), torch.tensor(config.model.dropout))
    first, same, other = (model(*given, seed.for_pass(torch.tensor(step), 0)) for step in (0, 0, 1))
    assert torch.equal(first, same)
    assert torch.equal(model(*given), model.eval()(*given))
    assert has_dropout(config.model) == (kind != "linear")
    assert torch.equal(first, other) == torch.equal(first, model(*given)) == (kind == "linear")


def test_a_transformer_layer_is_torchs_own():
    torch.manual_seed(0)
    config = small_config(model={"kind": "transformer", "layers": 2})
    model = build(config.model, small_dataset(config).signature)
    tokens = torch.randn(16, 5, 8)
    for layer in model.core.layers:
        layer.norm_first, layer.activation = True, nn.functional.gelu
        close(run_layer(layer, tokens, None, 0).detach(), layer.eval()(tokens).detach())


def test_it_learns_eight_windows_by_heart(kind):
    config, dataset = variant(kind, "flatten" if kind == "transformer" else "plain")
    config = small_config(
        model=config.model.model_dump() | {"dropout": 0.0, "hidden": 32, "layers": 1},
        train={"lr": 0.02},
    )
    torch.manual_seed(0)
    model = build(config.model, dataset.signature)
    batch = windows.gather(dataset.memory.series, dataset.memory.starts["train"][::20][:8])
    optimizer = optim.build_optimizer(config.train, list(model.parameters()), torch.tensor(0.02))
    for _ in range(250):
        optimizer.zero_grad()
        loss = compute_window_losses(
            model(batch.inputs, batch.static), batch.targets, config.train
        ).mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02


@pytest.mark.parametrize("normalize", ["last", "window"])
def test_normalized_models_follow_a_shift(kind, normalize):
    """Raise a window by a constant and the forecast rises with it."""
    config = small_config(model={"kind": kind, "normalize": normalize})
    dataset = small_dataset(config)
    model = build(config.model, dataset.signature).eval()
    inputs, _ = windows.gather_inputs(dataset.memory.series, dataset.memory.starts["train"][:3])
    close(
        (model(inputs + 5, None) - model(inputs, None)).detach(),
        5 * torch.ones(3, 4, 3, 1),
        rel=1e-4,
    )


def test_a_bidirectional_last_pool_takes_both_final_states():
    config = small_config(model={"bidirectional": True})
    dataset = small_dataset(config)
    model = build(config.model, dataset.signature).eval()
    inputs, _ = windows.gather_inputs(dataset.memory.series, dataset.memory.starts["train"][:3])
    layer = model.core.layers[0]
    _, (states, _) = layer(inputs)
    wanted = model.core.head.linear(torch.cat([states[0], states[1]], dim=-1))
    close(model.core(inputs, None).detach(), wanted.detach())


def test_patches_hold_rows_in_order():
    from slipstream.models.layers import to_patches

    rows = torch.arange(24.0).view(6, 2, 2)
    tokens = to_patches(rows, 3)
    assert tokens.shape == (2, 2, 6)
    for token in range(2):
        for window in range(2):
            wanted = rows[3 * token : 3 * token + 3, window].flatten()
            assert torch.equal(tokens[token, window], wanted)
