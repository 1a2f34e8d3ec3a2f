"""Masks: exactly as many rows as asked for, never none, never all, and always the same again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from slipstream.config import Pretrain
from slipstream.models import noise

KINDS = ("patch", "block", "random")


def key(number: int) -> torch.Tensor:
    return torch.tensor(number)


@given(
    kind=st.sampled_from(KINDS),
    context=st.integers(2, 90),
    length=st.integers(1, 12),
    ratio=st.floats(0.001, 0.999),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_every_window_has_the_same_number_of_masked_rows(kind, context, length, ratio, seed):
    length = min(length, context // 2)
    how = Pretrain(mask=kind, length=length, ratio=ratio)
    mask = noise.draw_mask(how, key(seed), context, 9)
    assert mask.shape == (context, 9)
    wanted = noise.count_masked_rows(how, context)
    assert mask.sum(dim=0).tolist() == [wanted] * 9
    assert 0 < wanted < context
    unit = length if kind == "patch" else 1
    room = context - context % unit
    nearest = min(max(round(ratio * context / unit) * unit, unit), room - unit)
    assert wanted == (nearest if unit > 1 else min(max(round(ratio * context), 1), context - 1))


def stretches(column: torch.Tensor) -> list[int]:
    """Lengths of a mask's runs of masked rows."""
    text = "".join("#" if row else "." for row in column.tolist())
    return [len(part) for part in text.split(".") if part]


def test_patches_are_whole_a_block_is_one_and_rows_stand_alone():
    patches = noise.draw_mask(Pretrain(ratio=0.3), key(1), 96, 200)
    assert all(length % 7 == 0 for w in range(200) for length in stretches(patches[:, w]))
    block = noise.draw_mask(Pretrain(mask="block"), key(1), 96, 200)
    assert all(stretches(block[:, w]) == [14] for w in range(200))
    single = noise.draw_mask(Pretrain(mask="random"), key(1), 96, 200)
    assert max(length for w in range(200) for length in stretches(single[:, w])) < 7


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_masked_about_as_often(kind):
    how = Pretrain(mask=kind, ratio=0.25)
    often = noise.draw_mask(how, key(5), 96, 20_000).float().mean(dim=1)
    share = noise.count_masked_rows(how, 96) / 96
    assert often.min() > 0
    if kind == "random":  # a block's edges are covered by fewer places
        assert (often / share - 1).abs().max() < 0.1
    assert float(often.mean()) == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_gives_the_same_mask_again_another_key_another(kind):
    how = Pretrain(mask=kind)
    first, again = (noise.draw_mask(how, key(3), 60, 50) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, noise.draw_mask(how, key(4), 60, 50))
    assert torch.equal(first[:, :20], noise.draw_mask(how, key(3), 60, 20))  # whatever comes after
    assert len({tuple(column) for column in first.T.tolist()}) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_always_validated_with_the_same_mask(kind):
    how = Pretrain(mask=kind)
    inputs = torch.randn(40, 30, 3, generator=torch.Generator().manual_seed(0))
    mask = noise.mask_windows(how, inputs, None)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mask[:, order], noise.mask_windows(how, inputs[:, order], None))
    assert torch.equal(mask[:, 7:8], noise.mask_windows(how, inputs[:, 7:8].clone(), None))
    assert len({tuple(column) for column in mask.T.tolist()}) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_draw_what_each_would_alone(kind):
    how = Pretrain(mask=kind)
    keys, inputs = torch.tensor([3, 9]), torch.randn(2, 40, 8, 3)

    def drawn(inputs, key):
        return noise.mask_windows(how, inputs, key)

    both = vmap(drawn)(inputs, keys)
    fixed = vmap(lambda one: noise.mask_windows(how, one, None))(inputs)
    for lane in range(2):
        assert torch.equal(both[lane], noise.mask_windows(how, inputs[lane], keys[lane]))
        assert torch.equal(fixed[lane], noise.mask_windows(how, inputs[lane], None))


def test_drawn_numbers_are_spread_as_they_should_be():
    even = noise.draw_uniform(key(2), 0, 100, 1000)
    assert float(even.min()) > 0
    assert float(even.max()) < 1
    assert float(even.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(even.var()) == pytest.approx(1 / 12, abs=0.002)
    bell = noise.draw_normal(key(2), 1, 100, 1000)
    assert float(bell.mean()) == pytest.approx(0, abs=0.02)
    assert float(bell.std()) == pytest.approx(1, abs=0.01)
    assert bell.isfinite().all()
    other = noise.draw_uniform(key(2), 1, 100, 1000)
    paired = torch.corrcoef(torch.stack([even.flatten(), other.flatten()]))
    assert abs(float(paired[0, 1])) < 0.02
