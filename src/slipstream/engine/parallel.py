"""One model over several processes: what ranks exchange and who writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.base.errors import ResumableError
from slipstream.config import Engine
from slipstream.engine.checkpoint import Checkpoint, CheckpointSchedule, CheckpointWriter
from slipstream.events import Event
from slipstream.runs import Run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for another that is alive; one that has died is noticed at once"""
LOST = "another process of this training has ended"


@dataclass(frozen=True)
class Ranks:
    """This process among those that train a model."""

    rank: int
    size: int
    control: ProcessGroup
    """On the host: decisions and validation losses"""
    gradients: ProcessGroup | None
    """NCCL on GPUs, gloo on CPUs; None sums nothing, for steps that one rank measures alone"""

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides, logs and writes."""
        return self.rank == 0

    def without_sums(self) -> Ranks:
        """The same share of every batch, in steps that do not wait for other ranks."""
        return replace(self, gradients=None)

    def sum_gradients(self, params: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Replace every gradient by its sum over the ranks, in one all-reduce; return the loss's.

        On CUDA this is recorded into the step's graph with everything else: the flat tensor then
        has its place in the graph's memory, and gradients are views of it. There is no host sync.
        """
        if self.gradients is None:
            return loss
        pairs = [(param, param.grad) for param in params if param.grad is not None]
        flat = torch.cat([*(grad.flatten() for _, grad in pairs), loss.reshape(1)])
        self._reduce(flat, self.gradients)
        pieces: tuple[Tensor, ...] = flat.split([*(grad.numel() for _, grad in pairs), 1])
        for (param, grad), piece in zip(pairs, pieces[:-1], strict=True):
            param.grad = piece.view(grad.shape)
        return pieces[-1][0]

    def sum(self, value: float) -> float:
        """Return the sum of a number over the ranks, in double precision."""
        total = torch.tensor([value], dtype=torch.float64)
        self._reduce(total, self.control)
        return float(total)

    def agree(self, *numbers: int) -> list[int]:
        """Return the largest of each number over the ranks: the same on all of them."""
        largest = torch.tensor(numbers, dtype=torch.int64)
        self._reduce(largest, self.control, largest=True)
        return largest.tolist()

    def lead(self, value: float) -> float:
        """Return the first rank's number."""
        number = torch.tensor([value], dtype=torch.float64)
        self._broadcast(number)
        return float(number)

    def share_text(self, text: str = "") -> str:
        """Return the first rank's text."""
        content = text.encode()
        length = int(self.lead(len(content)))
        data = torch.zeros(length, dtype=torch.uint8)
        if self.is_leader and content:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if length:
            self._broadcast(data)
        return data.numpy().tobytes().decode()

    def check_same(self, weights: Iterable[Tensor]) -> None:
        """Raise a ResumableError unless all ranks have these weights to the bit."""
        sums = [weight.detach().flatten().view(torch.uint8).sum() for weight in weights]
        number = int(torch.stack(sums).sum())
        largest, smallest = self.agree(number, -number)
        if largest != -smallest:
            raise ResumableError(
                "the processes of this training no longer have the same weights, which a fault of "
                "the hardware or a model that draws random numbers of its own may cause"
            )

    def _reduce(self, tensor: Tensor, group: ProcessGroup, *, largest: bool = False) -> None:
        import torch.distributed as dist

        how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with _explain_loss():
            dist.all_reduce(tensor, how, group=group)

    def _broadcast(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        with _explain_loss():
            dist.broadcast(tensor, src=0, group=self.control)


@contextmanager
def _explain_loss() -> Iterator[None]:
    """Raise a ResumableError where another rank has gone."""
    try:
        yield
    except RuntimeError as error:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise  # no rank was asked for anything: the step then runs eagerly
        raise ResumableError(LOST) from error


@contextmanager
def join(rank: int, size: int, device: torch.device, **where: Any) -> Iterator[Ranks]:
    """Meet the other ranks and train with them inside the block.

    `where` is what `init_process_group` finds them by. Untested on more than one GPU.
    """
    import torch.distributed as dist

    with _explain_loss():
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT, **where)
    try:
        control = gradients = dist.group.WORLD
        if device.type == "cuda":
            # NCCL connects the ranks at the first all-reduce, which is in a step that runs eagerly,
            # before one is recorded
            torch.cuda.set_device(device)
            gradients = dist.new_group(backend="nccl", timeout=TIMEOUT)
        assert control is not None
        yield Ranks(rank, size, control, gradients)
    finally:
        dist.destroy_process_group()


class StepPoll:
    """Says before which steps the ranks agree whether to pause: about four times a second, since
    each agreement has all of them wait for the slowest."""

    every_s = 0.25
    most_steps = 1000

    def __init__(self, ranks: Ranks, now: Callable[[], float]) -> None:
        self.ranks, self.now = ranks, now
        self.steps, self.left, self.polled_at = 1, 1, now()

    def is_due(self) -> bool:
        """Count a step; return whether it is time, which the first rank's clock decides."""
        self.left -= 1
        if self.left:
            return False
        now = self.now()
        fitting = self.steps * self.every_s / max(now - self.polled_at, 1e-6)
        wanted = min(max(int(fitting), 1), 2 * self.steps, self.most_steps)
        self.steps = self.left = int(self.ranks.lead(wanted))
        self.polled_at = now
        return True


class SilentRun(Run):
    """The run as ranks other than the first see it: they read its folder and log nothing."""

    def append(self, event: Event) -> None:
        pass

    def notify(self, event: Event) -> None:
        pass


class AgreedSchedule(CheckpointSchedule):
    """A schedule that is due on all ranks at the same steps. The others hold the same state as the
    first one, which writes it."""

    def __init__(self, engine: Engine, writer: CheckpointWriter, ranks: Ranks) -> None:
        super().__init__(engine, writer)
        self.ranks = ranks

    def is_due(self, *, validated: bool = False) -> bool:
        is_leader_due = self.ranks.is_leader and super().is_due(validated=validated)
        return bool(self.ranks.agree(is_leader_due)[0])

    def save(self, take: Callable[[], Checkpoint], *, point: object, best_step: int = 0) -> None:
        if self.ranks.is_leader:
            super().save(take, point=point, best_step=best_step)
