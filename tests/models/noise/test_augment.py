"""Augmentation: each kind does what it says, to the windows it meets, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from slipstream.config import Augment
from slipstream.config.train import KINDS
from slipstream.models.noise import SequenceLayout, augment, make_layout
from tests.conftest import close, small_config, small_dataset

T, B, F, H = 24, 200, 3, 4
KEY = torch.tensor(11)


def windows(batch=B):
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(T, batch, F, generator=draw).cumsum(dim=0)
    return inputs, torch.randn(batch, H, F, generator=draw)


def changed(how, key=KEY, *, batch=B, shared=F, shares=None, fold=1):
    inputs, targets = windows(batch)
    shares = torch.ones(batch // fold) if shares is None else shares
    return augment(how, key, inputs, targets, layout=SequenceLayout(shared, fold), shares=shares)


def on(kind, strength=0.4, chance=1.0):
    return Augment(**{kind: strength, f"{kind}_chance": chance})


def test_nothing_is_on_by_default():
    assert Augment().kinds == ()
    inputs, targets = windows()
    found = changed(Augment())
    assert torch.equal(found.inputs, inputs)
    assert torch.equal(found.targets, targets)


@pytest.mark.parametrize("kind", KINDS)
def test_the_chance_is_the_share_of_windows_it_meets_and_others_keep_every_bit(kind):
    inputs, _ = windows(4000)
    found = changed(on(kind, chance=0.3), batch=4000)
    met = (found.inputs != inputs).any(dim=2).any(dim=0)
    shrunk = 0.05 if kind == "cutmix" else 0.0  # where so few rows are asked for that there is none
    assert 0.27 - shrunk < float(met.float().mean()) < 0.33
    again = changed(on(kind, chance=0.3), batch=4000)
    assert torch.equal(found.inputs, again.inputs)
    other = changed(on(kind, chance=0.3), torch.tensor(12), batch=4000)
    assert not torch.equal(found.inputs, other.inputs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mixup", "cutmix")])
def test_a_window_does_not_depend_on_its_neighbours(kind):
    whole = changed(on(kind))
    inputs, targets = windows()
    few = augment(
        on(kind), KEY, inputs[:, :50], targets[:50], layout=SequenceLayout(F), shares=torch.ones(50)
    )
    close(whole.inputs[:, :50], few.inputs, rel=1e-6)
    close(whole.targets[:50], few.targets, rel=1e-6)


def test_jitter_has_the_deviation_asked_for():
    inputs, targets = windows(2000)
    found = changed(on("jitter", 0.25), batch=2000)
    noise = found.inputs - inputs
    assert float(noise.std()) == pytest.approx(0.25, rel=0.02)
    assert abs(float(noise.mean())) < 0.005
    assert torch.equal(found.targets, targets)


def test_scaling_is_one_factor_to_a_column_and_targets_follow_their_inputs():
    inputs, targets = windows()
    found = changed(on("scaling"), shared=2)
    factors = found.inputs / inputs
    assert float(factors.std(dim=0).max()) < 1e-3
    close(
        found.targets[..., :2] / targets[..., :2],
        factors[-1][:, None, -2:].expand(-1, H, -1),
        rel=1e-4,
    )
    assert torch.equal(found.targets[..., 2], targets[..., 2])


def test_volatility_keeps_the_mean_and_stretches_moves_and_targets_alike():
    inputs, targets = windows()
    found = changed(on("volatility"))
    mean = inputs.mean(dim=0)
    close(found.inputs.mean(dim=0), mean, rel=1e-5)
    factor = found.inputs.std(dim=0) / inputs.std(dim=0)
    close(factor, factor[:, :1].expand(-1, F), rel=1e-4)
    close(found.targets - mean[:, None], (targets - mean[:, None]) * factor[:, None, :1], rel=1e-4)
    assert float(factor.log().std()) == pytest.approx(0.4, rel=0.2)


@pytest.mark.parametrize("strength", [0.3, 0.99])
def test_a_warp_never_runs_backwards_and_keeps_both_ends(strength):
    rising = torch.arange(float(T))[:, None, None].expand(T, B, F).contiguous()
    found = augment(
        on("warp", strength),
        KEY,
        rising,
        torch.zeros(B, H, F),
        layout=SequenceLayout(0),
        shares=torch.ones(B),
    ).inputs
    assert (found.diff(dim=0) > 0).all()
    assert float(found[0].abs().max()) < 1e-5
    assert float((found[-1] - (T - 1)).abs().max()) < 1e-4
    assert float((found - rising).abs().max()) > 0.05 * T * strength / 3.2


def test_a_slice_is_the_windows_end_stretched():
    rising = torch.arange(float(T))[:, None, None].expand(T, B, F).contiguous()
    found = augment(
        on("slice", 0.5),
        KEY,
        rising,
        torch.zeros(B, H, F),
        layout=SequenceLayout(0),
        shares=torch.ones(B),
    ).inputs
    assert float((found[-1] - (T - 1)).abs().max()) < 1e-4
    first = found[0, :, 0]
    assert float(first.min()) >= 0
    assert float(first.max()) <= 0.5 * (T - 1)
    assert float(first.max()) > 0.4 * (T - 1)
    steps = found.diff(dim=0)
    assert float((steps - steps.mean(dim=0)).abs().max()) < 1e-4


def test_mixup_blends_inputs_by_the_share_that_losses_are_blended_by():
    inputs, _ = windows()
    found = changed(on("mixup"))
    assert (found.partner != torch.arange(B)).all()
    other = inputs[:, found.partner]
    close(found.inputs, inputs + (other - inputs) * found.blend[:, None], rel=1e-6)
    assert 0.35 < float(found.blend.max()) < 0.4


def test_cutmix_takes_one_stretch_and_tells_its_share():
    inputs, _ = windows()
    found = changed(on("cutmix", 0.5))
    other = inputs[:, found.partner]
    taken = (found.inputs == other).all(dim=2)
    close(taken.float().mean(dim=0), found.blend, rel=1e-5)
    assert (taken.int().diff(dim=0).abs().sum(dim=0) <= 2).all()
    assert torch.equal(found.inputs[~taken], inputs[~taken])


@pytest.mark.parametrize("real", [1, 2, 7])
def test_padding_is_nobodys_partner(real):
    shares = torch.zeros(10)
    shares[:real] = 0.1
    found = changed(on("mixup"), batch=20, shares=shares, fold=2)
    assert (found.partner // 2 < real).all()
    assert torch.equal(found.partner % 2, torch.arange(20) % 2)  # the same channel
    if real > 1:
        assert (found.partner // 2 != torch.arange(20) // 2)[: 2 * real].all()


def test_lanes_are_augmented_as_each_would_be_alone():
    how = Augment(**dict.fromkeys(KINDS, 0.3))
    inputs, targets = windows(40)
    keys, shares = torch.tensor([5, 6]), torch.ones(40)

    def one(key, inputs):
        found = augment(how, key, inputs, targets, layout=SequenceLayout(F), shares=shares)
        return found.inputs, found.targets, found.blend

    both = vmap(one)(keys, torch.stack([inputs, 2 * inputs]))
    for lane, (key, given) in enumerate(zip(keys, (inputs, 2 * inputs), strict=True)):
        for found, wanted in zip(both, one(key, given), strict=True):
            close(found[lane], wanted, rel=1e-6)


def test_noise_by_column_reaches_no_other_column():
    inputs, targets = windows()
    how = on("jitter", (0.0, 0.5, 2.0))
    layout = SequenceLayout(0, jitter=torch.tensor([how.jitter]))
    noise = augment(how, KEY, inputs, targets, layout=layout, shares=torch.ones(B)).inputs - inputs
    assert not noise[..., 0].any()
    close(noise[..., 1].std(), 0.5, rel=0.05)
    close(noise[..., 2].std(), 2.0, rel=0.05)
    alike = changed(on("jitter", 0.5)).inputs - inputs
    assert torch.equal(noise[..., 1], alike[..., 1])  # the same draws as of one number


def test_noise_of_independent_channels_is_that_of_each():
    config = small_config(data={"channels": "independent", "horizon": 2, "targets": ["a", "b"]})
    signature = small_dataset(config).signature
    others = len(signature.inputs) - 2
    amounts = tuple(float(i) for i in range(len(signature.inputs)))
    layout = make_layout(Augment(jitter=amounts), signature, torch.device("cpu"))
    assert layout.fold == 2
    assert layout.jitter[:, :-1].tolist() == [list(amounts[:others])] * 2
    assert layout.jitter[:, -1].tolist() == list(amounts[others:])
