"""Every kind of model is registered, tested, pre-trained where it can be, and searched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import slipstream
from slipstream import config as configs
from slipstream.config.model import CUSTOM, SPECS
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.kernels import causal_conv
from slipstream.models.forecaster import build
from slipstream.models.kinds import Kind, load_kind
from slipstream.models.layers import load_network
from slipstream.training import encoder as pretrained
from tests.conftest import KINDS, SMALL, close, merged, mostly_slow, small_config, waves

ENCODERS = [kind for kind, spec in SPECS.items() if spec.is_sequential]


def test_the_contract_covers_every_kind():
    assert set(KINDS) == set(SPECS)


@pytest.mark.parametrize("kind", SPECS)
def test_a_network_has_what_its_spec_promises(kind):
    model = small_config(model={"kind": kind}).model
    spec, known = SPECS[kind], load_kind(model)
    assert (known.input_weights is not None) == spec.is_sequential
    assert (known.row_encoder is not None) == spec.carries_state
    if spec.can_pad and spec.has_hidden:
        assert type(known).get_unit_axes is not Kind.get_unit_axes
    template = Path(slipstream.__file__).parent / f"exporting/c/templates/{known.c_template}.c.j2"
    assert template.exists()
    settings = {*spec.settings, *spec.search, *spec.encoder_settings}
    assert settings <= set(configs.Model.model_fields)
    assert spec.width_divisor is None or spec.width_divisor in spec.settings


def test_a_class_of_the_users_own_has_a_spec_too():
    assert configs.Model(kind="nets:Mixer").spec is CUSTOM


@pytest.mark.parametrize("kind", mostly_slow(ENCODERS, "lstm"))
def test_an_encoder_is_pretrained_and_started_from(tmp_path, kind):
    """Fine-tuning reads the columns in another order, and computes the same tokens."""
    base = merged(SMALL, {"out": str(tmp_path), "model": {"kind": kind, "layers": 2}})
    base["data"] = {"context": 24, "time": "time"}
    base = merged(base, {"train": {"epochs": 2, "batch": 64}})
    table = waves(300)
    run = slipstream.pretrain(base, table).run
    start = {
        "train": {"init_from": str(run)},
        "data": {"targets": ["a"], "horizon": 2, "time": "time"},
    }
    config = configs.load(merged({"out": str(tmp_path), "train": {"epochs": 1}}, start))
    encoder = pretrained.load_encoder(config)
    dataset = datasets.load_dataset(config, table, known=encoder.scaler)
    assert dataset.signature.inputs == ("b", "c", "a")
    model = build(config.model, dataset.signature)
    match = pretrained.match_weights(encoder, config, dataset.signature, model)
    model.load_state_dict(match.weights, strict=False)
    masked = build(encoder.config.model, encoder.signature)
    masked.load_state_dict(encoder.weights)
    batch = windows.gather(dataset.memory.series, dataset.memory.starts["train"][:5])
    with torch.no_grad():
        mine = model.eval().core.encode(batch.inputs)
        theirs = masked.eval().core.encode(batch.inputs[..., [2, 0, 1]])
    close(mine, theirs)
    assert slipstream.train(config, table).summary["steps"] > 0


def test_a_search_over_a_tcn_trains_widths_in_one_pack(tmp_path):
    space = {"model.hidden": [5, 8], "model.kernel_size": [2, 4]}
    search = {"trials": 4, "retrain": 0, "pruner": "none", "sampler": "grid", "space": space}
    config = merged(SMALL, {"out": str(tmp_path), "model": {"kind": "tcn"}, "tune": search})
    summary = slipstream.tune(merged(config, {"train": {"epochs": 1}}), waves(300)).summary
    assert summary["trials"]["finished"] == 4
    assert summary["packs"] == 2  # one for each kernel size


@pytest.mark.parametrize(
    ("T", "taps", "dilation"), [(9, 3, 2), (5, 4, 3), (3, 2, 8), (1, 3, 1), (6, 1, 1), (4, 3, 3)]
)
@pytest.mark.parametrize("lanes", [False, True])
def test_a_causal_convolution_is_torchs_padded_at_the_front(T, taps, dilation, lanes):
    torch.manual_seed(0)
    shapes = (3, T, 2, 5), (3, 7, 5, taps), (3, 7)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def wanted(x, weight, bias):
        padded = F.pad(x.permute(1, 2, 0), ((taps - 1) * dilation, 0))
        return F.conv1d(padded, weight, bias, dilation=dilation).permute(2, 0, 1)

    def ours(x, weight, bias):
        return causal_conv(x, weight, bias, dilation=dilation)

    theirs = torch.stack([wanted(*lane) for lane in zip(*leaves, strict=True)])
    if lanes:
        mine = torch.func.vmap(ours)(*leaves)
    else:
        mine = torch.stack([ours(*lane) for lane in zip(*leaves, strict=True)])
    grad = torch.randn_like(theirs)
    close(mine.detach(), theirs.detach(), rel=1e-12)
    pairs = zip(
        torch.autograd.grad(mine, leaves, grad),
        torch.autograd.grad(theirs, leaves, grad),
        strict=True,
    )
    for a, b in pairs:
        close(a, b, rel=1e-12)


def test_a_tcns_last_token_sees_its_receptive_field_and_no_further():
    config = small_config(model={"kind": "tcn", "layers": 2, "kernel_size": 2, "hidden": 8})
    torch.manual_seed(0)
    core = load_network(config.model)(config.model, context=16, inputs=3, static=0, outputs=None)
    inputs = torch.randn(16, 1, 3, requires_grad=True)
    core(inputs, None)[-1].sum().backward()
    seen = inputs.grad.abs().sum(dim=(1, 2)) > 0
    field = 1 + 2 * (2 - 1) * (2**2 - 1)
    assert seen[-field:].all()
    assert not seen[:-field].any()
