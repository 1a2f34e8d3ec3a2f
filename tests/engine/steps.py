"""Runs a few training steps of a small model, eagerly or captured, and returns their losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from slipstream import hardware
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import loop, optim, plan, step
from slipstream.models import build


def run_steps(
    config: Config,
    dataset: Dataset,
    *,
    steps: int,
    capture: bool = False,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of `steps` steps over as many epochs as it takes, and the weights they end with."""
    engine = config.engine.model_copy(update={"capture": capture})
    chosen = plan.make(engine, data_bytes=0)
    flags = hardware.flags(threads=chosen.threads, tf32=chosen.precision == "tf32")
    with flags, torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = build(config.model, dataset.signature).to(chosen.device)
        series = dataset.series.to(chosen.device)
        starts = dataset.starts["train"]
        job = loop.set_up(config, model, series, dataset.starts, chosen)
        tape = job.tape
        losses: list[float] = []
        epoch = 0
        while len(losses) < steps:
            rates = optim.rates(config.train, epoch, len(tape.losses))
            tape.load(step.shuffled(starts, seed=config.seed, epoch=epoch), rates)
            wanted = min(len(tape.losses), steps - len(losses))
            with around():
                for _ in range(wanted):
                    job.advance()
            losses += tape.losses[:wanted].tolist()
            epoch += 1
        assert not job.failures()
        return losses, {name: value.cpu() for name, value in model.state_dict().items()}
