"""A padded model is the model."""

from __future__ import annotations

import pytest
import torch

from slipstream.config.model import SPECS
from slipstream.data import windows
from slipstream.models import padding
from slipstream.models.forecaster import build
from tests.conftest import close, small_config, small_dataset, waves

VARIANTS = {
    "lstm": {"kind": "lstm"},
    "gru, both ways, attention": {"kind": "gru", "bidirectional": True, "pool": "attention"},
    "lstm, both ways, flat patches": {
        "kind": "lstm",
        "bidirectional": True,
        "pool": "flatten",
        "patch": 4,
    },
    "gru, mean": {"kind": "gru", "pool": "mean"},
    "mlp": {"kind": "mlp", "pool": "flatten"},
    "linear": {"kind": "linear"},
    "nhits": {"kind": "nhits"},
    "tcn": {"kind": "tcn", "kernel_size": 2},
    "tcn, attention, patches": {"kind": "tcn", "pool": "attention", "patch": 2},
    "tcn, flat": {"kind": "tcn", "pool": "flatten"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_keeps_outputs_and_gradients_and_is_undone(variant):
    data = {"static": ["k"], "id": "id", "future": ["b"]}
    one_width = SPECS[VARIANTS[variant]["kind"]].has_one_width
    narrow, wide = (
        small_config(model=VARIANTS[variant] | {"hidden": sizes, "layers": 2}, data=data)
        for sizes in ((5, 7) if one_width else ([3, 5], [7, 6]))
    )
    table = waves(200).to_pydict()
    table["id"], table["k"] = [0] * 100 + [1] * 100, [0.5] * 100 + [1.5] * 100
    dataset = small_dataset(narrow, table)
    models = [build(config.model, dataset.signature) for config in (narrow, wide)]
    sizes = narrow.model, wide.model, 16 // narrow.model.patch
    given = windows.gather_inputs(dataset.memory.series, dataset.memory.starts["train"][:6])
    models[1].load_state_dict(padding.pad_weights(models[0].state_dict(), *sizes))
    outputs = [model(*given) for model in models]
    close(outputs[1].detach(), outputs[0].detach())
    gradients = []
    for model, out in zip(models, outputs, strict=True):
        out.square().sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    ones = {name: torch.ones_like(gradient) for name, gradient in gradients[0].items()}
    is_own = padding.pad_weights(ones, *sizes)
    for name, gradient in gradients[1].items():
        assert not gradient[is_own[name] == 0].any(), name
    cut = padding.unpad_weights(gradients[1], *sizes)
    for name, gradient in gradients[0].items():
        if name != "core.pool.score.bias":  # a softmax ignores it: its gradient is rounding
            close(cut[name], gradient)
    back = padding.unpad_weights(models[1].state_dict(), *sizes)
    assert all(torch.equal(back[name], value) for name, value in models[0].state_dict().items())


def test_the_widest_has_every_layers_largest_size():
    models = [small_config(model={"hidden": sizes, "layers": 2}).model for sizes in ([3, 9], 5)]
    assert padding.find_widest(models).sizes == (5, 9)
