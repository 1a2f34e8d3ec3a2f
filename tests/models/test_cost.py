"""Multiply-adds, compared with products that are counted while a model runs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from slipstream.models.forecaster import build
from slipstream.models.shapes import count_multiply_adds
from tests.conftest import small_config, small_dataset

SHAPES = {
    "mlp": {"model": {"kind": "mlp", "layers": 2}},
    "linear": {"model": {"kind": "linear"}},
    "nhits": {"model": {"kind": "nhits", "layers": 2}, "data": {"horizon": 9}},
    "tcn": {"model": {"kind": "tcn", "layers": 2}},
    "tcn, patches": {"model": {"kind": "tcn", "patch": 4, "pool": "flatten"}},
    "transformer": {"model": {"kind": "transformer", "pool": "attention"}},
    "independent": {"model": {"kind": "mlp"}, "data": {"channels": "independent"}},
    "known ahead": {"model": {"kind": "mlp"}, "data": {"future": ["b"]}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_count_is_that_of_the_products_of_one_window(shape):
    config = small_config(**SHAPES[shape])
    signature = small_dataset(config).signature
    model = build(config.model, signature).eval()
    count = signature.sequences_per_window
    inputs = torch.zeros(signature.context, count, signature.model_inputs)
    width = signature.static_width
    static = torch.zeros(count, width) if width else None
    plain = sdpa_kernel(SDPBackend.MATH)  # a fused attention on the CPU is not counted
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), plain:
        model(inputs, static)
    assert count_multiply_adds(config.model, signature) == counter.get_total_flops() // 2


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
def test_a_recurrent_model_takes_its_matrices_once_a_row(kind, gates):
    config = small_config(model={"kind": kind, "hidden": [8, 5], "layers": 2})
    signature = small_dataset(config).signature
    row = gates * (8 * (3 + 8) + 5 * (8 + 5))
    head = 5 * 4 * 3
    assert count_multiply_adds(config.model, signature, carried=True) == row + head
    assert count_multiply_adds(config.model, signature) == 16 * row + head


def test_a_class_of_the_users_is_not_counted():
    config = small_config(model={"kind": "nets:Mixer"})
    assert count_multiply_adds(config.model, small_dataset().signature) is None
