"""The step program: what trains the lanes in its places, and the step of a single model.

The loop knows programs by `StepProgram` alone. `engine.single` trains one model, `engine.pack` many
at once. Both run a step without a host sync, so that it can be captured:
everything that changes from step to step lives in tensors that keep their place.

Shapes: K places, S steps of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slipstream.base.errors import UserError
from slipstream.engine import recovery
from slipstream.engine.batches import BatchSource, CarriedStates, MicroBatch, Program
from slipstream.engine.capture import CaptureSeconds
from slipstream.engine.lanes import EpochStart, Lane
from slipstream.engine.objective import Objective
from slipstream.engine.optim import ParameterUpdate
from slipstream.engine.parallel import Ranks
from slipstream.engine.plan import Plan
from slipstream.models.noise import Noise

EVAL_BATCH = 1024
"""Windows in one forward pass without gradients"""
DrawNoise = Callable[[Tensor, int], Noise]
"""From a step, counted over the whole run, and a pass of it to the noise of that pass"""
Rows = dict[str, Tensor]
"""All that training has changed of one lane, by the program's own names"""
NO_ROWS: Mapping[str, Tensor] = MappingProxyType({})


class StepProgram(Protocol):
    """Trains the lanes in its places, one step of all of them at a time.

    This is all that the loop and the training state know of a program. `SingleProgram` and `Pack`
    inherit it, with the answers below that most programs give.
    """

    plan: Plan
    """As it runs; recoveries and the review of the threads may have changed it"""
    mode: str
    """How lanes are trained: "together", "branches" or "one at a time\""""
    advance: Program
    """Runs one step of every lane, without a host sync"""

    @property
    def num_places(self) -> int: ...

    @property
    def losses(self) -> Tensor:
        """[K, S]: the losses of each lane's current epoch"""

    @property
    def positions(self) -> Tensor | None:
        """[K]: the steps that each lane has done in its epoch, where fp16 gradients may overflow:
        such a step is repeated by the next one. None where every step counts."""

    # a lane: from its place, epoch by epoch, to its best weights

    def put(self, place: int, lane: Lane, rows: Mapping[str, Tensor] = NO_ROWS) -> None:
        """Give a place to a lane as it begins, or as it was when its rows were read; its epoch has
        still to `begin`."""

    def num_steps(self, place: int) -> int:
        """Count the steps of one of the lane's epochs."""

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        """Start epochs, by place. From an epoch's first step on, `go_back` leads there."""

    def update_rates(self, epochs: Mapping[int, EpochStart]) -> None:
        """Change the learning rates of epochs that have begun, by place; steps that were launched
        keep theirs. There is no host sync."""

    def go_back(self, place: int) -> None:
        """Put a lane back to where its epoch began."""

    def score(self, places: Sequence[int], should_stop: Callable[[], bool]) -> list[float] | None:
        """Compute the validation losses of some lanes; None if it has to stop before that."""

    def keep_best(self, places: Sequence[int]) -> None:
        """Keep these lanes' weights as their best so far."""

    def load_best(self, place: int) -> None:
        """Put a lane that is between two epochs back to its best weights, with no moments."""

    def weights(self, place: int) -> dict[str, Tensor]:
        """Return a lane's weights as they are now, under the model's own names."""

    # all lanes: what a checkpoint saves, and what the log says

    def state(self) -> dict[str, Tensor]:
        """Return all that training changes, by name; the lane's place comes first."""

    def best_weights(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        """Read a lane's best weights from its rows, under the model's own names."""

    def kernels(self) -> list[str]:
        """Name the decisive kernels of the training step, where it was captured."""

    def failures(self) -> dict[str, str]:
        """Return the programs that could not be captured, and why."""

    def capture_s(self) -> CaptureSeconds:
        """Return the time that building kernels and recording took within the steps."""

    def close(self) -> None:
        """Release workers, threads, graphs and memory."""

    # with answers that a program may leave as they are

    def prepare(self, place: int, epoch: EpochStart) -> bool:
        """Lay out an epoch on the host, so that `begin` has less to do; False if it was already."""
        return False

    def flush(self) -> None:
        """Run the steps that have been put off."""
        return

    def leave(self, place: int) -> None:
        """Empty a place."""
        return

    def leave_low_precision(self) -> bool:
        """Train in fp32 from now on; False where that is no remedy."""
        return False

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the lanes to build the program again."""
        return {}

    def compact(self, places: Sequence[int]) -> StepProgram:
        """Build a smaller program with some places as they stand, and close this one; or return
        this one."""
        return self


@dataclass(frozen=True)
class EpochBuffers:
    """The tensors that the steps of an epoch read and write, beside their windows."""

    rates: Tensor
    """[S]: learning rates"""
    losses: Tensor
    """[S]"""
    cursor: Tensor
    """[1]: the next step"""
    first_step: Tensor
    """[1]: steps of the run before the epoch's first"""
    states: Sequence[Tensor] = ()
    """The states that steps hand on, one tensor per layer; none where windows begin with zeros"""

    def begin(
        self, rates: list[float] | None = None, *, step: int = 0, first: int | None = None
    ) -> None:
        """Set the next step, and where they are given, the rates and the first step's number."""
        if rates is not None:
            self.rates.copy_(torch.tensor(rates))
        if first is not None:
            self.first_step.fill_(first)
        self.cursor.fill_(step)

    def end_step(self, loss: Tensor, is_update: Tensor | None) -> None:
        """Record the loss and go on; a step that was no update stays the next one."""
        self.losses.index_copy_(0, self.cursor, loss[None])
        self.cursor.add_(1 if is_update is None else is_update)

    def update_rates(self, rates: list[float]) -> None:
        """Replace the rates once the steps that were launched are done, without a host sync."""
        self.rates.copy_(send(torch.tensor(rates), self.rates.device))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host in the order of the device's work, for which the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def build_buffers(
    num_steps: int, device: torch.device, states: Sequence[Tensor] = ()
) -> EpochBuffers:
    return EpochBuffers(
        rates=torch.zeros(num_steps, device=device),
        losses=torch.zeros(num_steps, device=device),
        cursor=torch.zeros(1, dtype=torch.int64, device=device),
        first_step=torch.zeros(1, dtype=torch.int64, device=device),
        states=states,
    )


def build_training_step(
    model: nn.Module,
    batches: BatchSource,
    buffers: EpochBuffers,
    update: ParameterUpdate,
    *,
    objective: Objective,
    noise: DrawNoise | None,
    ranks: Ranks | None = None,
) -> Program:
    """One step: gather, forward, loss, backward, sum over ranks, clip, update.

    Where fp16 gradients overflow, nothing changes but the loss scale, and the next call repeats the
    step.
    """
    params = [p for p in model.parameters() if p.requires_grad]

    def advance() -> None:
        model.train()
        update.begin(buffers.rates, buffers.cursor)
        before = [] if update.scale is None else [state.clone() for state in buffers.states]
        total: Tensor | None = None
        for number, micro_batch in enumerate(batches.get_micro_batches(buffers.cursor)):
            here = noise and noise((buffers.first_step + buffers.cursor)[0], number)
            loss = compute_loss(model, micro_batch, here, objective=objective)
            # not backward(scale): a gradient that is handed in has torch load a second of modules
            (loss if update.scale is None else loss * update.scale.scale).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        if ranks is None:
            is_update = update.apply(params)
        else:
            total = ranks.sum_gradients(params, total)
            is_update = _update_once(update, params)
        if is_update is not None:
            for state, old in zip(buffers.states, before, strict=True):
                state.copy_(torch.where(is_update, state, old))
        buffers.end_step(total, is_update)

    return advance


def _update_once(update: ParameterUpdate, params: list[nn.Parameter]) -> Tensor | None:
    """Update the weights; the step cannot be repeated, since the other ranks have done it."""
    try:
        return update.apply(params)
    except recovery.MEMORY_ERRORS as error:
        why = recovery.explain_shortage(error)
        raise UserError(
            f"out of memory in the update of the weights ({why}); lower train.batch or model.hidden"
        ) from None


def build_validation_step(
    model: nn.Module, batches: BatchSource, buffers: EpochBuffers, *, objective: Objective
) -> Program:
    """One batch of the validation set; its summed loss goes into the buffers."""

    @torch.no_grad()
    def advance() -> None:
        model.eval()
        for micro_batch in batches.get_micro_batches(buffers.cursor):  # there is one
            loss = compute_loss(model, micro_batch, None, objective=objective)
            buffers.losses.index_copy_(0, buffers.cursor, loss[None])
        buffers.cursor.add_(1)

    return advance


def compute_loss(
    model: nn.Module, micro_batch: MicroBatch, noise: Noise | None, *, objective: Objective
) -> Tensor:
    """The windows' weighted loss; padding weighs nothing."""
    run: Callable[..., Any] = model
    if micro_batch.carried is not None:
        run = partial(_continue_rows, model, micro_batch.carried)
    losses = objective(run, micro_batch.batch, micro_batch.weights, noise)
    return (losses * micro_batch.weights).sum()


def _continue_rows(
    model: Any, carried: CarriedStates, inputs: Tensor, static: Tensor | None, noise: Noise | None
) -> Tensor:
    """Predict after every row; the gradient ends at the states before the first one."""
    features, after = model.encode_rows(inputs, carried.before, noise)
    carried.after.extend(state.detach() for state in after)
    prediction: Tensor = model.decode_rows(features.flatten(0, 1), static)
    return prediction


class Round(NamedTuple):
    """Steps that were launched on the device."""

    steps: int
    losses: Tensor
    """[K, S]: complete when the steps are done"""
    event: torch.cuda.Event | None
    is_complete: bool
    """Whether it reached the next log line. One that a signal or a checkpoint cut short is logged
    with its rest, so that a resumed run has the log of an uninterrupted one."""
    positions: Tensor | None = None
    """[K]: where each lane is afterwards, if steps may have been repeated"""

    def count_done(self, place: int, before: int) -> int:
        """Count the steps that a lane took which had done so many of its epoch before."""
        return self.steps if self.positions is None else int(self.positions[place]) - before

    def is_done(self) -> bool:
        return self.event is None or self.event.query()


def close_round(program: StepProgram, steps: int, *, is_complete: bool) -> Round:
    """Build the round of these steps; its event fires when the device has done them."""
    program.flush()
    losses, positions = program.losses, program.positions
    if not losses.is_cuda:
        positions = None if positions is None else positions.clone()
        return Round(steps, losses, None, is_complete, positions)
    losses, positions = _begin_read(losses), None if positions is None else _begin_read(positions)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(program.plan.device))
    return Round(steps, losses, event, is_complete, positions)


def _begin_read(tensor: Tensor) -> Tensor:
    """Copy to the host, in the order of the device's work."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
