"""Runs a few training steps of a small model, eagerly or captured, and returns their losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import batches, plan
from slipstream.engine.context import RunContext
from slipstream.engine.lanes import EpochStart, compute_lrs
from slipstream.engine.parallel import Ranks
from slipstream.engine.planning import make_plan
from slipstream.engine.single import build_step
from slipstream.models.forecaster import build
from slipstream.runs import Run


def make_task(
    config: Config, dataset: Dataset, chosen: plan.Plan, run: Run | None = None
) -> RunContext:
    torch.manual_seed(config.seed)
    model = build(config.model, dataset.signature).to(chosen.device)
    series = None if dataset.memory is None else dataset.memory.series
    if series is not None and chosen.home == "device":
        series = series.to(chosen.device)
    run = run or Run(Path("nowhere"))
    found = batches.prepare_copies(config, dataset, run)
    return RunContext(run, config, dataset, chosen, network=model, series=series, copies=found)


def run_steps(
    config: Config,
    dataset: Dataset,
    *,
    steps: int,
    capture: bool = False,
    batch: int | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ranks: Ranks | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of `steps` steps over as many epochs as it takes, and the weights they end with."""
    engine = config.engine.model_copy(update={"capture": capture})
    streamed = dataset.stream is not None
    chosen = make_plan(
        config.model_copy(update={"engine": engine}), data_bytes=0, streamed=streamed
    )
    with chosen.flags(), torch.random.fork_rng():
        task = replace(make_task(config, dataset, chosen), ranks=ranks)
        job = build_step(task, replace(chosen, micro_batch=batch))
        losses: list[float] = []
        epoch = 0
        while len(losses) < steps:
            job.batches.start_epoch(epoch)
            rates = compute_lrs(config.train, EpochStart(epoch), job.batches.num_steps)
            job.buffers.begin(rates, first=len(losses))
            wanted = min(job.batches.num_steps, steps - len(losses))
            with around():
                for _ in range(wanted):
                    job.advance()
                job.flush()
            job.catch_up(wanted)  # reads how far they came, as a loop does once a round
            losses += job.buffers.losses[:wanted].tolist()
            epoch += 1
        assert not job.failures()
        job.close()
        return losses, {name: value.cpu() for name, value in task.model.state_dict().items()}
