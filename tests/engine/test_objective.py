"""One objective for every way to train: alone, captured, in lanes; masked and augmented."""

from __future__ import annotations

import copy

import pytest
import torch

from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.config.train import KINDS
from slipstream.data import windows
from slipstream.engine import objective
from slipstream.engine.context import resolve_settings
from slipstream.engine.lanes import Lane
from slipstream.engine.planning import make_plan
from slipstream.models import noise as masks
from slipstream.models.forecaster import build
from slipstream.models.losses import compute_collapse_penalty, compute_window_losses
from slipstream.models.noise import Noise
from tests.conftest import (
    SMALL,
    close,
    merged,
    mostly_slow,
    slow,
    small_config,
    small_dataset,
    waves,
)
from tests.engine.lanes.test_pack import packed, same_as_alone, train
from tests.engine.steps import run_steps
from tests.labelled import CLASSIFY, states

MASKED = {"train": {"objective": "masked", "batch": 32, "epochs": 12, "lr": 0.01}}
EVERY = dict.fromkeys(KINDS, 0.3)
JOBS = {
    "masked lstm": merged(MASKED, {"pretrain": {"variance": 0.1}, "model": {"layer_norm": False}}),
    "masked transformer": merged(
        MASKED, {"model": {"kind": "transformer", "patch": 2, "normalize": "window"}}
    ),
    "masked channels": merged(MASKED, {"data": {"channels": "independent"}, "augment": EVERY}),
    "augmented": {"augment": EVERY, "train": {"epochs": 12}, "model": {"kind": "gru"}},
    "augmented channels": {
        "augment": EVERY,
        "data": {"channels": "independent"},
        "model": {"normalize": "last", "kind": "mlp"},
        "train": {"epochs": 12, "accumulate": 2},
    },
    "augmented, known ahead": {
        "augment": EVERY,
        "data": {"channels": "independent", "future": ["b"]},
        "model": {"normalize": "window", "kind": "gru"},
        "train": {"epochs": 12},
    },
    "augmented classes": merged(
        CLASSIFY, {"augment": EVERY, "train": {"class_weights": [1.0, 2.0, 3.0], "epochs": 12}}
    ),
}


def of(config, dataset):
    chosen = make_plan(config, data_bytes=0)
    return objective.build_objective(config, dataset.signature, chosen, drops=False)


def some(dataset, count=12):
    return windows.gather(dataset.memory.series, dataset.memory.starts["train"][:count])


def noise(number=3):
    return Noise(torch.tensor(number), torch.tensor(0.0))


def data_of(config):
    return small_dataset(config, states() if config.data.task == "classify" else None)


@pytest.mark.parametrize("mode", ["together", slow("branches")])
@pytest.mark.parametrize("job", mostly_slow(JOBS, "masked lstm", "augmented", "augmented classes"))
def test_lanes_do_what_each_would_alone(job, mode):
    config = small_config(**JOBS[job])
    dataset = data_of(config)
    lanes = [
        Lane(config.model_copy(update={"seed": seed}), dataset.memory.starts) for seed in (0, 5)
    ]
    pack = packed(lanes, dataset, mode)
    same_as_alone(lanes, dataset, pack, train(pack, steps=20))
    pack.close()


@pytest.mark.slow
def test_masked_lanes_may_differ_in_width():
    for variance in (0.0, 0.1):
        config = small_config(**merged(JOBS["masked lstm"], {"pretrain": {"variance": variance}}))
        dataset = small_dataset(config)
        wide = config.model.model_copy(update={"hidden": 11})
        lanes = [
            Lane(config.model_copy(update={"model": model}), dataset.memory.starts)
            for model in (config.model, wide)
        ]
        if variance:  # its mean is over all units, and zeros would be some
            with pytest.raises(UserError, match=r"model.hidden \(with pretrain.variance\)"):
                packed(lanes, dataset, "together")
            continue
        pack = packed(lanes, dataset, "together")
        same_as_alone(lanes, dataset, pack, train(pack, steps=20))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("job", JOBS)
def test_captured_steps_are_the_eager_ones(job, precision):
    engine = {"device": "cuda", "precision": precision}
    config = small_config(**merged(JOBS[job], {"engine": engine}))
    dataset = data_of(config)
    eager, weights = run_steps(config, dataset, steps=20)
    captured, others = run_steps(config, dataset, steps=20, capture=True)
    assert eager == captured
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_only_masked_rows_count():
    config = small_config(**MASKED)
    dataset = small_dataset(config)
    batch = some(dataset)
    shares = torch.ones(12)
    mask = masks.mask_windows(config.pretrain, batch.inputs, noise().key)
    off = torch.arange(36.0).view(12, 3)  # by window and column

    def model(inputs, given, _, places):
        assert torch.equal(given, mask)
        rows = torch.where(mask[..., None], inputs + off, 1e6)
        return masks.gather_rows(rows, places), torch.zeros(16, 12, 4)

    found = of(config, dataset)(model, batch, shares, noise())
    close(found, off.square().mean(dim=1))


@pytest.mark.parametrize("patch", [1, 4])
@pytest.mark.parametrize("mask", ["patch", "block", "random"])
def test_decoding_what_is_masked_alone_gives_the_same_rows(mask, patch):
    asked = {"model": {"patch": patch, "normalize": "window"}, "pretrain": {"mask": mask}}
    config = small_config(**merged(MASKED, asked))
    dataset = small_dataset(config)
    torch.manual_seed(0)
    model = build(config.model, dataset.signature).eval()
    inputs = some(dataset).inputs
    hidden = masks.mask_windows(config.pretrain, inputs, noise().key)
    places = masks.find_masked_rows(config.pretrain, hidden)
    assert torch.equal(hidden, torch.zeros_like(hidden).scatter(0, places, True))
    assert bool((places.diff(dim=0) > 0).all())
    with torch.no_grad():
        every, tokens = model(inputs, hidden)
        only, same = model(inputs, hidden, None, places)
    close(only, masks.gather_rows(every, places))
    assert torch.equal(tokens, same)


def test_the_model_cannot_see_what_is_masked():
    for normalize in ("none", "last", "window"):
        config = small_config(**merged(MASKED, {"model": {"normalize": normalize}}))
        dataset = small_dataset(config)
        torch.manual_seed(0)
        model = build(config.model, dataset.signature).eval()
        inputs = some(dataset).inputs
        mask = masks.mask_windows(config.pretrain, inputs, noise().key)
        other = torch.where(mask[..., None], inputs + 100 * torch.randn_like(inputs), inputs)
        for one, two in zip(model(inputs, mask), model(other, mask), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("seed", range(4))
def test_nearly_constant_masked_windows_keep_their_digits(seed):
    config = small_config(**merged(MASKED, {"model": {"normalize": "window"}}))
    torch.manual_seed(seed)
    model = build(config.model, small_dataset(config).signature).eval()
    exact = copy.deepcopy(model).double()
    for spread in (1e-1, 1e-2, 1e-3):
        level = 10 * torch.randn(1, 7, model.inputs)
        inputs = level + spread * level.abs() * torch.randn(256, 7, model.inputs)
        mask = masks.mask_windows(config.pretrain, inputs, noise().key)
        with torch.no_grad():
            rows, tokens = model(inputs, mask)
            exact_rows, exact_tokens = exact(inputs.double(), mask)
        assert float((rows - exact_rows).abs().max()) <= 1e-5
        assert float((tokens - exact_tokens).abs().max()) <= 1e-5


def test_validation_masks_the_same_rows_and_adds_no_penalty():
    config = small_config(**merged(MASKED, {"pretrain": {"variance": 5.0}}))
    dataset = small_dataset(config)
    torch.manual_seed(0)
    model = build(config.model, dataset.signature).eval()
    batch = some(dataset)
    asked = of(config, dataset)
    with torch.no_grad():
        whole = asked(model, batch, torch.ones(12), None)
        turned = batch._replace(inputs=batch.inputs.flip(1))
        close(asked(model, turned, torch.ones(12), None), whole.flip(0))
        plain = of(small_config(**MASKED), dataset)
        close(plain(model, batch, torch.ones(12), None), whole)
        trained = asked(model, batch, torch.ones(12), noise())
        _, tokens = model(
            batch.inputs, masks.mask_windows(config.pretrain, batch.inputs, noise().key)
        )
        without = plain(model, batch, torch.ones(12), noise())
        close(
            trained - without,
            (5.0 * compute_collapse_penalty(tokens, torch.ones(12))).expand(12),
            rel=1e-4,
        )


def test_collapse_is_one_where_windows_are_alike_and_leaves_padding_out():
    tokens = torch.randn(6, 40, 5) * 3
    alike = tokens[:, :1].expand(-1, 40, -1)
    assert float(compute_collapse_penalty(alike, torch.ones(40))) == pytest.approx(0.99, abs=1e-3)
    assert float(compute_collapse_penalty(tokens, torch.ones(40))) < 0.05
    shares = torch.ones(40)
    shares[20:] = 0
    padded = torch.cat([tokens[:, :20], 1e3 * torch.ones(6, 20, 5)], dim=1)
    close(
        compute_collapse_penalty(padded, shares),
        compute_collapse_penalty(tokens[:, :20], torch.ones(20)),
    )
    deviation = tokens.std(dim=1, correction=0)
    close(
        compute_collapse_penalty(tokens, torch.ones(40)) + 1,
        torch.relu(1 - deviation).mean() + 1,
        rel=1e-4,
    )


def test_validation_is_never_augmented_and_training_is():
    config = small_config(augment=EVERY)
    dataset = small_dataset(config)
    torch.manual_seed(0)
    model = build(config.model, dataset.signature).eval()
    batch, shares = some(dataset), torch.ones(12)
    plain = compute_window_losses(model(batch.inputs, None), batch.targets, config.train)
    asked = of(config, dataset)
    assert torch.equal(asked(model, batch, shares, None), plain)
    assert not torch.allclose(asked(model, batch, shares, noise()), plain)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_rows_ahead_are_blended_as_the_losses_are_and_static_columns_stay(kind):
    blends = {kind: 0.5, f"{kind}_chance": 1.0}
    config = small_config(data={"future": ["b"], "static": ["k"], "id": "id"}, augment=blends)
    table = waves(200).to_pydict()
    table["id"], table["k"] = [0] * 100 + [1] * 100, [0.5] * 100 + [1.5] * 100
    dataset = small_dataset(config, table)
    starts = dataset.memory.starts["train"][::8][:12].contiguous()
    batch, seen = windows.gather(dataset.memory.series, starts), {}

    def model(_, static, *__):
        seen["static"] = static
        return torch.zeros(*batch.targets.shape, 1)

    found = of(config, dataset)(model, batch, torch.ones(12), noise())
    assert torch.equal(seen["static"][:, 0], batch.static[:, 0])
    ahead, own = seen["static"][:, 1:], batch.static[:, 1:]
    alone = batch.targets.square().flatten(1).mean(dim=1)
    for window in range(12):
        fits = []
        for partner in (one for one in range(12) if one != window):
            way = own[partner] - own[window]
            share = ((ahead[window] - own[window]) @ way) / (way @ way)
            if torch.allclose(own[window] + share * way, ahead[window], atol=1e-5):
                fits.append((1 - share) * alone[window] + share * alone[partner])
        assert any(torch.allclose(one, found[window], rtol=1e-3) for one in fits)


@pytest.mark.parametrize("task", [{}, CLASSIFY])
def test_blended_windows_have_blended_losses(task):
    config = small_config(**merged(task, {"augment": {"mixup": 0.5, "mixup_chance": 1.0}}))
    dataset = data_of(config)
    batch, shares = some(dataset), torch.ones(12)
    seen = {}
    said = torch.linspace(-1, 1, dataset.signature.outputs) if task else torch.zeros(1)

    def model(inputs, *_):
        seen["inputs"] = inputs
        return said.expand(*batch.targets.shape, -1)

    found = of(config, dataset)(model, batch, shares, noise())
    alone = batch.targets.square().flatten(1).mean(dim=1)
    if task:
        alone = -said.log_softmax(0)[batch.targets.long()].flatten()
        assert len(set(alone.tolist())) > 1
    blend = (seen["inputs"] - batch.inputs).abs().sum(dim=(0, 2))
    assert (blend > 0).all()
    for window in range(12):
        # the blend says which partner it was, and how much of it
        mixes = [
            (partner, share)
            for partner in range(12)
            if partner != window
            and (share := _share(seen["inputs"], batch.inputs, window, partner))
        ]
        ((partner, share),) = mixes
        close(found[window], (1 - share) * alone[window] + share * alone[partner], rel=1e-4)


@pytest.mark.parametrize("kind", ["scaling", "volatility"])
def test_a_label_that_is_an_input_too_keeps_its_class(kind):
    data = {"inputs": ["a", "state"], "horizon": 2}
    config = small_config(**merged(CLASSIFY, {"data": data, "augment": {kind: 0.5}}))
    dataset = data_of(config)
    assert dataset.signature.shared == 1
    batch, shares = some(dataset, 48), torch.ones(48)
    said = torch.linspace(-1, 1, dataset.signature.outputs)
    assert len(batch.targets.unique()) == 3

    def model(*_):
        return said.expand(*batch.targets.shape, -1)

    asked = of(config, dataset)
    plain = asked(model, batch, shares, None)
    assert torch.equal(asked(model, batch, shares, noise()), plain)


def test_validations_are_judged_by_the_metric():
    config = small_config(train={"loss": "quantile", "metric": "mae"}, augment=EVERY)
    dataset = small_dataset(config)
    torch.manual_seed(0)
    model = build(config.model, dataset.signature).eval()
    batch, shares = some(dataset), torch.ones(12)
    chosen = make_plan(config, data_bytes=0)
    judged = objective.build_validation_objective(config, dataset.signature, chosen)
    errors = (model(batch.inputs, None)[..., 1] - batch.targets).abs().flatten(1).mean(dim=1)
    with torch.no_grad():
        close(judged(model, batch, shares, None), errors.detach())


def _share(mixed, inputs, window, partner):
    """How much of a partner is in a window; None where it is not the partner."""
    towards = inputs[:, partner] - inputs[:, window]
    step = mixed[:, window] - inputs[:, window]
    share = float((step * towards).sum() / towards.square().sum())
    return share if torch.allclose(step, share * towards, atol=1e-5) else None


def test_without_augmentation_not_a_bit_changes():
    config = small_config(model={"kind": "gru", "dropout": 0.0})
    dataset = small_dataset(config)
    plain = run_steps(config, dataset, steps=10)
    asked = configs.load(merged(SMALL, {"model": {"kind": "gru", "dropout": 0.0}, "augment": {}}))
    again = run_steps(asked, dataset, steps=10)
    assert plain[0] == again[0]


@pytest.mark.parametrize("scale", ["standard", "minmax", "none"])
def test_noise_by_column_is_the_same_in_physical_units_however_it_is_scaled(scale):
    how = {"augment": {"jitter": {"c": 0.05}}, "data": {"scale": scale}}
    config = small_config(**how)
    dataset = small_dataset(config)
    resolved = resolve_settings(config, dataset)
    amounts = dict(zip(dataset.signature.inputs, resolved.augment.jitter, strict=True))
    assert amounts["a"] == amounts["b"] == 0.0
    physical = amounts["c"] * dataset.scaler.size["c"]
    assert physical == pytest.approx(0.05 * dataset.scaler.deviation["c"])
    assert resolve_settings(resolved, dataset) == resolved
