"""The numpy networks compute what the torch ones do, for every setting that training accepts."""

from __future__ import annotations

import copy

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from slipstream.config import Signature
from slipstream.data import windows
from slipstream.data.scaler import Scaler
from slipstream.engine.planning import make_plan
from slipstream.inference.networks import predict_scaled
from slipstream.inference.portable import PortableModel
from slipstream.models.forecaster import build
from slipstream.models.shapes import list_shapes
from slipstream.scoring.predict import make_predictor
from tests.conftest import KINDS, close, small_config

ACTIVATIONS = ("relu", "gelu", "silu", "elu", "leaky_relu", "tanh")


@st.composite
def draw_models(draw):
    """A config's model, and columns that it may have."""
    kind = draw(st.sampled_from(KINDS))
    recurrent, flat = kind in ("lstm", "gru"), kind in ("mlp", "linear", "nhits")
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    sizes = [pick(4, 6) for _ in range(pick(1, 2))] if recurrent or flat else [8] * pick(1, 2)
    model = {
        "kind": kind,
        "hidden": sizes if recurrent or flat else 8,
        "layers": len(sizes),
        "normalize": pick("none", "last", "window"),
        "activation": pick(*ACTIVATIONS),
        "heads": pick(1, 2),
        "positions": pick("learned", "sinusoidal"),
        "kernel_size": pick(1, 2, 3),
        "stacks": pick(1, 2, 3),
        "output_range": pick(None, (-0.5, 0.7)),
    }
    if not flat:
        model |= {"patch": pick(1, 2, 4), "pool": pick("last", "mean", "attention", "flatten")}
    if recurrent:
        model |= {"bidirectional": pick(True, False), "layer_norm": pick(True, False)}
    horizon, shared = pick(0, 1, 3), pick(0, 1, 2)
    independent = shared == 2 and horizon > 0 and pick(True, False)
    targets = ("t0", "t1") if shared == 2 or pick(True, False) else ("t0",)
    future = ("f0",) if horizon and pick(True, False) else ()
    classes = ("x", "y", "z") if len(targets) == 1 and pick(True, False) else ()
    signature = Signature(
        inputs=(*future, "a", *targets[:shared]),
        targets=targets,
        static=("s0", "s1") if pick(True, False) else (),
        shared=min(shared, len(targets)),
        context=pick(4, 8),
        horizon=horizon,
        channels="independent" if independent else "together",
        quantiles=() if classes else pick((), (0.1, 0.5, 0.9)),
        step=None,
        classes=classes,
        output_range=None if classes else model["output_range"],
        future=future,
    )
    return model, signature


def make_pair(model, signature, seed):
    """The same network in torch and in numpy, and how columns are scaled."""
    config = small_config(model=model, data={"context": signature.context})
    torch.manual_seed(seed)
    network = build(config.model, signature).eval()
    for weight in network.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    names = (*signature.inputs, *signature.targets, *signature.static)
    numbers = {name: float(i % 3) for i, name in enumerate(names)}
    sizes = {name: 1.0 + i % 2 for i, name in enumerate(names)}
    scaler = Scaler("standard", numbers, sizes, sizes, numbers, numbers)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    return network, PortableModel(config, signature, scaler, weights)


def predict_torch(network, portable, values, static, starts):
    signature = portable.signature
    plan = make_plan(portable.config, data_bytes=0, training=False)
    predict = make_predictor(network, plan, signature, portable.scaler)
    offsets = np.array([0, len(values)])
    series = windows.build_series(values, static, None, offsets, signature)
    with torch.inference_mode():
        raw = predict(series, torch.from_numpy(starts))
    return windows.merge_channels(raw, signature.sequences_per_window).numpy()


def gather(values, static, starts, signature):
    rows = values[starts[:, None] + np.arange(signature.context), : len(signature.inputs)]
    beside = [] if static is None else [static.repeat(len(starts), axis=0)]
    steps, columns = signature.future_shape
    if columns:
        ahead = values[starts[:, None] + signature.lead + np.arange(steps), :columns]
        beside.append(ahead.reshape(len(starts), -1))
    return rows, np.concatenate(beside, axis=1) if beside else None


def check_parity(model, signature, batch, seed=0):
    network, portable = make_pair(model, signature, seed)
    shapes = {name: weight.shape for name, weight in portable.weights.items()}
    assert list_shapes(portable.config.model, signature) == shapes
    draw = np.random.default_rng(seed)
    columns = len(signature.inputs) + len(signature.targets) - signature.shared
    rows = signature.context + signature.horizon + batch
    values = draw.standard_normal((rows, columns)).astype(np.float32)
    static = None
    if signature.static:
        static = draw.standard_normal((1, len(signature.static))).astype(np.float32)
    starts = np.arange(batch)
    wanted = predict_torch(network, portable, values, static, starts)
    got = predict_scaled(portable, *gather(values, static, starts, signature))
    assert got.dtype == np.float32
    close(got, wanted)


@hypothesis.settings(max_examples=60)
@hypothesis.given(draw_models(), st.sampled_from([1, 7]), st.integers(0, 3))
def test_every_setting_predicts_as_torch_does(drawn, batch, seed):
    check_parity(*drawn, batch, seed)


@pytest.mark.parametrize("future", [(), ("f0",)])
@pytest.mark.parametrize("seed", range(4))
def test_nearly_constant_windows_keep_their_digits(seed, future):
    """Alone, in lanes and in numpy: 1e-5 from the network in float64 on the same rows."""
    signature = Signature(
        inputs=(*future, "a", "t0"),
        targets=("t0", "t1"),
        static=(),
        shared=1,
        context=8,
        horizon=2,
        channels="together",
        quantiles=(),
        step=None,
        future=future,
    )
    network, portable = make_pair({"kind": "linear", "normalize": "window"}, signature, seed)
    exact = copy.deepcopy(network).double()
    weights, _ = torch.func.stack_module_state([network, network])
    draw = np.random.default_rng(seed)
    beside = torch.from_numpy(draw.standard_normal((7, 2)).astype(np.float32)) if future else None

    def predict_in_lanes(one, rows):
        return torch.func.functional_call(network, one, (rows, beside))

    for spread in (1e-1, 1e-2, 1e-3):
        level = 10 * draw.standard_normal((1, 7, 2 + len(future)))
        noise = draw.standard_normal((8, 7, level.shape[-1]))
        rows = torch.from_numpy((level * (1 + spread * noise)).astype(np.float32))
        with torch.inference_mode():
            wanted = exact(rows.double(), None if beside is None else beside.double())
            alone = network(rows, beside)
            lanes = torch.func.vmap(predict_in_lanes, in_dims=(0, None))(weights, rows)
        numbers = None if beside is None else beside.numpy()
        arrays = predict_scaled(portable, rows.transpose(0, 1).numpy(), numbers)
        for found in (alone, lanes[0], lanes[1], torch.from_numpy(arrays)):
            assert float((found - wanted).abs().max()) <= 1e-5


@pytest.mark.parametrize("kind", ["lstm", "gru", "tcn"])
def test_longer_windows_than_the_context_are_allowed(kind, signature):
    """A recurrent or convolutional model that pools the last token reads any length."""
    network, portable = make_pair({"kind": kind, "hidden": 8, "layers": 2}, signature, 0)
    rows = np.random.default_rng(0).standard_normal((3, 16, 2)).astype(np.float32)
    with torch.inference_mode():
        wanted = network(torch.from_numpy(rows).transpose(0, 1), None)
    close(predict_scaled(portable, rows, None), wanted)
