from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.engine.batches import shuffle_starts
from slipstream.engine.lanes import EpochStart, compute_lrs
from slipstream.models.forecaster import build
from slipstream.models.losses import compute_window_losses
from tests.conftest import KINDS, close, slow, small_config, small_dataset
from tests.engine.steps import run_steps


def plain_loop(config, dataset, *, steps):
    """The same training as anyone would write it: slices, a torch optimizer, no padding."""
    torch.manual_seed(config.seed)
    model = build(config.model, dataset.signature).train()
    torch.manual_seed(config.seed)
    train, signature = config.train, dataset.signature
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    series, losses, epoch = dataset.memory.series, [], 0
    effective = train.batch * train.accumulate
    while len(losses) < steps:
        order = shuffle_starts(dataset.memory.starts["train"], seed=config.seed, epoch=epoch)
        rates = compute_lrs(train, EpochStart(epoch), -(-len(order) // effective))
        for at, starts in enumerate(order.split(effective)):
            if len(losses) == steps:
                break
            x = torch.stack([series.inputs[s : s + signature.context] for s in starts], dim=1)
            y = torch.stack([series.targets[s + 16 : s + 20] for s in starts])
            loss = compute_window_losses(model(x, None), y, train).mean()
            optimizer.param_groups[0]["lr"] = rates[at]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses, model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [slow(1), 3])
def test_the_step_is_what_a_plain_loop_does(kind, accumulate):
    """Ragged last batches, accumulation, clipping and the schedule included."""
    config = small_config(
        model={"kind": kind, "dropout": 0.0, "layers": 2},
        train={"accumulate": accumulate, "batch": 48, "lr": 0.01, "epochs": 6, "clip": 0.5},
    )
    dataset = small_dataset(config)
    assert len(dataset.memory.starts["train"]) % (48 * accumulate)
    found, weights = run_steps(config, dataset, steps=20)
    wanted, reference = plain_loop(config, dataset, steps=20)
    close(found, wanted, rel=1e-4)
    for name, value in reference.items():
        if not name.endswith("in_proj_bias"):  # the keys' bias has no gradient but rounding
            close(weights[name], value, rel=2e-3)


def test_padding_counts_nothing():
    """A step of 3 windows is the same whether the batch holds 3 or 32."""
    sections = {"model": {"dropout": 0.0}, "data": {"split": {"rows": [22, 30, 30]}}}
    exact = small_config(train={"batch": 3, "lr": 0.01}, **sections)
    padded = small_config(train={"batch": 32, "lr": 0.01}, **sections)
    dataset = small_dataset(exact)
    assert len(dataset.memory.starts["train"]) == 3
    close(run_steps(padded, dataset, steps=10)[0], run_steps(exact, dataset, steps=10)[0])


def test_one_config_gives_the_same_bits_twice():
    config = small_config(model={"layers": 2, "dropout": 0.3})
    dataset = small_dataset(config)
    first, second = (run_steps(config, dataset, steps=15) for _ in range(2))
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_on_the_cpu_stays_close_to_fp32(kind):
    sections = {"model": {"kind": kind, "dropout": 0.0}, "train": {"lr": 0.01}}
    exact = small_config(**sections)
    rough = small_config(engine={"precision": "bf16"}, **sections)
    dataset = small_dataset(exact)
    close(run_steps(rough, dataset, steps=20)[0], run_steps(exact, dataset, steps=20)[0], rel=0.05)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "rmsprop"])
def test_every_optimizer_lowers_the_loss(optimizer):
    lr = 0.5 if optimizer == "sgd" else 0.02
    config = small_config(train={"optimizer": optimizer, "lr": lr, "epochs": 20, "batch": 300})
    losses, _ = run_steps(config, small_dataset(config), steps=20)
    assert losses[-1] < 0.9 * losses[0]
