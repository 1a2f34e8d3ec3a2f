"""How the processes of a training meet, and which run they continue."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.rank import NO_ID, RankPlace
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import parallel as groups
from slipstream.engine.parallel import Ranks
from slipstream.models.forecaster import build
from slipstream.runs import Run

MARKER = "torchrun.json"
"""In a run folder: the run id of the torchrun that trains it"""


def find_device(config: Config, place: RankPlace) -> torch.device:
    """Return the process's own GPU, or the CPU."""
    device = machine.choose_device(config.engine.device)
    if device.type == "cpu":
        return device
    check_gpus(place.local_rank + 1)
    return torch.device("cuda", place.local_rank)


def check_gpus(needed: int) -> None:
    """Raise a UserError unless each of so many processes has a GPU of its own."""
    count = torch.cuda.device_count()
    if needed > count:
        raise UserError(
            f"{format_count(needed, 'process')} of one training need as many GPUs, and torch sees "
            f"{count}; lower engine.data_parallel (or torchrun's processes) to {count}, or set "
            'engine.device = "cpu"'
        )


def check_size(wanted: int, place: RankPlace) -> None:
    """Raise a UserError where `engine.data_parallel` and torchrun disagree."""
    if wanted not in (1, place.size):
        raise UserError(
            f"engine.data_parallel is {wanted}, and torchrun has started "
            f"{format_count(place.size, 'process')}; remove the setting, or start {wanted}"
        )


def check_model(model: nn.Module) -> None:
    """Raise a UserError for layers whose result depends on the other windows of the batch."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"engine.data_parallel does not work with {type(layer).__name__} ({name}): each "
                "process would normalise its own share of the batch; use LayerNorm or GroupNorm, "
                "or one process"
            )


def check_dataset(config: Config, dataset: Dataset) -> None:
    """Raise a UserError for data or a model that several processes cannot train with."""
    if dataset.stream is not None:
        raise UserError(
            "engine.data_parallel does not work with series that are streamed from disk; give each "
            "machine more memory, cut the data, or set engine.data_parallel = 1"
        )
    if config.model.spec.is_custom:
        with torch.random.fork_rng([]):
            check_model(build(config.model, dataset.signature))


@dataclass(frozen=True)
class Together:
    """The first process's knowledge of the others."""

    ranks: Ranks
    place: RankPlace

    def open(self, run: Run) -> Ranks:
        """Tell who has to know that the run exists; log why its processes were started again."""
        self.place.announce(run.folder)
        mark_run(run.folder, self.place)
        if self.place.why:
            run.append("recovery", what=self.place.why, remedy="all processes, started again")
        return self.ranks


@contextmanager
def meet(config: Config, place: RankPlace) -> Iterator[Ranks]:
    """Train with the other processes inside the block."""
    if place.store is not None:
        where: dict[str, Any] = {"init_method": Path(place.store).absolute().as_uri()}
    else:
        where = {"store": _open_torchrun_store(place)}
    with groups.join(place.rank, place.size, find_device(config, place), **where) as ranks:
        yield ranks


def _open_torchrun_store(place: RankPlace) -> Any:
    """Return torchrun's store. Restarted processes need names of their own in it: it may still have
    the addresses of those before."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=groups.TIMEOUT))
    return c10d.PrefixStore(f"slipstream-{place.restarts}", store)


def mark_run(folder: Path, place: RankPlace) -> None:
    """Have the processes that torchrun starts again find this run."""
    if place.run_id:
        runs.write_json(folder / MARKER, {"run_id": place.run_id})


def find_marked_run(place: RankPlace, config: Config) -> Path | None:
    """Return the run that the same torchrun has begun, if there is one to go on with.

    Before the first restart that is an unfinished run of the same name given to torchrun
    (`--rdzv-id`), as after a job was queued again.
    """
    is_named = not place.run_id.startswith(NO_ID)
    if not (place.restarts or (is_named and place.run_id)):
        return None
    for marker in sorted(Path(config.out).glob(f"*/{MARKER}"), reverse=True):
        if runs.read_json(marker) == {"run_id": place.run_id}:
            has_ended = (marker.parent / "metrics.json").exists()
            return marker.parent if place.restarts or not has_ended else None
    return None
