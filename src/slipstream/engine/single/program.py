"""The step program of a single model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.config.base import hash_seed
from slipstream.engine import optim, recovery
from slipstream.engine.batches.source import Program
from slipstream.engine.capture import CaptureSeconds
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.engine.single.step import SingleStep, build_step
from slipstream.engine.single.task import TrainingTask
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.models import OWN_KERNELS, build
from slipstream.text import format_count


class SingleProgram:
    """The step program of a single model; lanes train in it one after another.

    Where memory runs out, it goes on from the same step with half the windows per pass. It freezes
    and thaws a pre-trained encoder as the config wants it.
    """

    mode = "one at a time"
    num_places = 1

    def __init__(self, task: TrainingTask, plan: Plan) -> None:
        self.task, self.plan = task, plan
        self.best: dict[str, Tensor] = {}
        self._step: SingleStep | None = None
        self._epoch = EpochStart()
        self._requested = 0
        """Steps that were requested of the current step program"""
        self._good: dict[str, Tensor] = {}
        """What `go_back` leads to, by the names of `_collect_state`"""
        self._restored: dict[str, Tensor] = {}
        """Rows that wait for the step to be built"""
        self._is_used = False
        self._captured_s = CaptureSeconds()
        """Of the lanes before"""

    @property
    def step(self) -> SingleStep:
        assert self._step is not None, "no epoch has begun"
        return self._step

    @property
    def losses(self) -> Tensor:
        return self.step.buffers.losses[None]

    def put(self, place: int, lane: Lane) -> None:
        """Give the place to a lane. The first one starts from the task's model as it is, unless it
        has another seed, each later one from weights drawn from its own seed."""
        self.close()
        self._captured_s, self._step = self.capture_s(), None
        is_other = self._is_used or lane.config.seed != self.task.config.seed
        self.task = self.task.for_lane(lane)
        if is_other:
            self._draw_weights(lane)
        self._is_used = True
        self.best, self._good, self._restored = {}, {}, {}

    def _draw_weights(self, lane: Lane) -> None:
        """Have the model begin as it would alone, with torch's generators, which a custom model may
        draw from while it trains."""
        device, model = self.plan.device, self.task.model
        seed = hash_seed(lane.config.seed)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            new = build(lane.config.model, self.task.dataset.signature)
        model.load_state_dict(new.state_dict() | dict(lane.init))
        model.requires_grad_(True)
        torch.manual_seed(seed)

    def num_steps(self, place: int) -> int:
        return self.task.num_steps

    def prepare(self, place: int, epoch: EpochStart) -> bool:
        return False  # batch sources do that in a thread of their own

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        (self._epoch,) = epochs.values()
        frozen = optim.is_frozen(self.task.config.train, self._epoch.number)
        if self._step is None:
            self._step, self._requested = self._build_step(frozen), 0
            self._load_rows()
        elif self._step.frozen and not frozen:
            self._thaw()
        self.step.begin(self._epoch)
        if not self._epoch.step or not self._good:
            self._good = {name: t.clone() for name, t in self._collect_state().items()}

    def _thaw(self) -> None:
        """Train the encoder as well; nothing of the step that spared it is left."""
        self.step.close()
        if self.plan.capture:
            recovery.free_memory()
        epoch, before = self._epoch.number + 1, self._epoch.steps_before
        self.task.run.append("thaw", what="the encoder", epoch=epoch, step=before)
        self._rebuild_step(frozen=False)

    def _rebuild_step(self, *, frozen: bool | None = None) -> None:
        """Build the step by the plan as it is now, with the optimizer and the buffers of before."""
        self._step = build_step(self.task, self.plan, like=self.step, frozen=frozen)
        self._requested = 0

    def update_rates(self, epochs: Mapping[int, EpochStart]) -> None:
        (self._epoch,) = epochs.values()
        self.step.update_rates(self._epoch)

    def load_best(self, place: int) -> None:
        for name, tensor in self._model_state().items():
            tensor.copy_(self.best[name])
        if self._step is None:  # it is about to be restored
            names = [name for name in self._restored if name.startswith("live.optimizer.")]
            for name in names:
                del self._restored[name]
        else:  # in place: a captured step reads them where they are
            for tensor in self._optimizer_state().values():
                tensor.zero_()

    def advance(self) -> None:
        self._requested += 1
        self._survive(self.step.advance)
        if self.task.config.engine.sync:
            int(self.step.buffers.cursor)

    @property
    def positions(self) -> Tensor | None:
        return self.step.positions

    def flush(self) -> None:
        self._survive(self.step.flush)

    def _survive(self, action: Program) -> None:
        """Run steps; where one fails, run those that are missing in a way that may work."""
        while True:
            try:
                action()
                return
            except Exception as error:
                recover = self._find_remedy(error)
            # past the except block, whose traceback would pin the failed step's tensors
            missing, position = self._count_missing(), int(self.step.buffers.cursor)
            recover()
            self._requested = missing
            self.step.batches.start_epoch(self._epoch.number, at=position)
            self.step.buffers.begin(at=position)
            action = self._catch_up

    def _count_missing(self) -> int:
        """Count the steps that were requested and not taken: a graph collects several."""
        return self._requested - self.step.num_taken

    def _catch_up(self) -> None:
        for _ in range(self._count_missing()):
            self.step.advance()
        self.step.flush()

    def _find_remedy(self, error: Exception) -> Program:
        """Return what helps against an error of a step; raise one that nothing helps against."""
        if isinstance(error, ResumableError):  # another process is gone
            raise error
        why = recovery.first_line(error)
        if recovery.is_out_of_memory(error):
            return partial(self._halve, why)
        if self._may_leave_own_kernels(error):
            return partial(self._leave_own_kernels, why)
        raise error

    def _build_step(self, frozen: bool) -> SingleStep:
        """Build the step, with cuDNN's layers if our own kernels cannot be built."""
        try:
            return build_step(self.task, self.plan, frozen=frozen)
        except Exception as error:
            if recovery.is_out_of_memory(error) or not self._may_leave_own_kernels(error):
                raise
            why = recovery.first_line(error)
        # past the except block, whose traceback would pin the failed step's tensors
        self._plan_without_own_kernels(why)
        return build_step(self.task, self.plan, frozen=frozen)

    def _may_leave_own_kernels(self, error: Exception) -> bool:
        """Whether an error may be one of our kernels on the GPU, whose compiler raises anything."""
        is_ours = isinstance(error, UserError | Interrupted)
        is_open = OWN_KERNELS in self.plan.cudnn and self.task.config.engine.cudnn == "auto"
        return self.plan.device.type == "cuda" and is_open and not is_ours

    def _leave_own_kernels(self, why: str) -> None:
        """Build the step with cuDNN's layers."""
        self.step.close()
        self._plan_without_own_kernels(why)
        self._rebuild_step()

    def _plan_without_own_kernels(self, why: str) -> None:
        self.task.run.append("fallback", what="cuDNN instead of our own kernels", why=why)
        reasons = self.plan.reasons | {"cudnn": f"our own kernels failed: {why}"}
        cudnn = ("persistent",) * len(self.plan.cudnn)
        self.plan = replace(self.plan, cudnn=cudnn, reasons=reasons)

    def _halve(self, why: str) -> None:
        """Build the step with half the windows per pass and the effective batch kept."""
        if self.step.micro_batch == 1:
            raise UserError(
                f"out of memory with a single window per pass ({why}); try "
                f"{recovery.suggest_remedies(self.task.config)}"
            )
        batch = -(-self.step.micro_batch // 2)
        self.step.close()
        recovery.free_memory()
        remedy = f"{format_count(batch, 'window')} per pass"
        self.task.run.append("recovery", what="out of memory", remedy=remedy, why=why)
        self.plan = replace(self.plan, micro_batch=batch)
        self._rebuild_step()

    def score(self, places: Sequence[int], should_stop: Callable[[], bool]) -> list[float] | None:
        while True:
            try:
                total = self._validate(should_stop)
                break
            except Exception as error:
                recover = self._find_remedy(error)
            recover()
        if total is None:
            return None
        if (ranks := self.task.ranks) is not None:
            ranks.check_same(self.task.model.parameters())
            total = ranks.sum(total)
        return [total / self.task.dataset.num_windows["val"]]

    def _validate(self, should_stop: Callable[[], bool]) -> float | None:
        """Sum the losses of this process's validation windows; None if it has to stop before."""
        current = self.step
        current.val_batches.start_epoch(0)
        current.val_buffers.begin()
        for _ in range(current.val_batches.num_steps):
            if should_stop():
                return None
            current.validate_batch()
        return float(current.val_buffers.losses.double().sum())

    def weights(self, place: int) -> dict[str, Tensor]:
        return self._model_state()

    def keep_best(self, places: Sequence[int]) -> None:
        if places:
            self.best = {name: t.detach().clone() for name, t in self._model_state().items()}

    def best_weights(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        return {name: row.to(self.plan.device) for name, row in _strip(rows, "best.").items()}

    def go_back(self, place: int) -> None:
        for name, tensor in self._collect_state().items():
            if name in self._good:
                tensor.copy_(self._good[name])
            else:  # copied before the first step, when the optimizer had no state
                tensor.zero_()

    def leave_low_precision(self) -> bool:
        if self.plan.precision != "fp16":
            return False
        reasons = self.plan.reasons | {"precision": "fp16 gave a loss that was not finite"}
        self.step.close()
        self.plan = replace(self.plan, precision="fp32", reasons=reasons)
        self._rebuild_step()
        return True

    def leave(self, place: int) -> None:
        pass  # the next lane, or `close`, takes the step away

    def _model_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.task.model.state_dict()
        return state

    def _collect_state(self) -> dict[str, Tensor]:
        """The tensors that a step changes: those of the model, the optimizer and the scale."""
        tensors = {f"model.{name}": tensor for name, tensor in self._model_state().items()}
        tensors |= self._optimizer_state() | _scale_state(self.step.update.scale)
        tensors |= {f"carried.{i}": state for i, state in enumerate(self.step.buffers.states)}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        optimizer, tensors = self.step.optimizer, dict[str, Tensor]()
        for i, param in enumerate(_list_params(optimizer)):
            state = sorted(optimizer.state.get(param, {}).items())
            tensors |= {f"optimizer.{i}.{name}": t for name, t in state if isinstance(t, Tensor)}
        return tensors

    def state(self) -> dict[str, Tensor]:
        groups = {"live": self._collect_state(), "good": self._good, "best": self.best}
        tensors = {
            f"{kind}.{name}": t[None] for kind, ts in groups.items() for name, t in ts.items()
        }
        return tensors | {"losses": self.losses}

    def restore(self, place: int, rows: Mapping[str, Tensor]) -> None:
        try:
            self.task.model.load_state_dict(_strip(rows, "live.model."))
        except RuntimeError as error:
            raise UserError(f"the checkpoint does not fit: {error}") from None
        device = self.plan.device
        self.best = {name: row.to(device, copy=True) for name, row in _strip(rows, "best.").items()}
        self._good = {name: row.to(device) for name, row in _strip(rows, "good.").items()}
        self._restored = dict(rows)

    def _load_rows(self) -> None:
        """Give the optimizer, the loss scale and the losses what `restore` has brought."""
        rows, self._restored = self._restored, {}
        device, current = self.plan.device, self.step
        params = _list_params(current.optimizer)
        for key, value in _strip(rows, "live.optimizer.").items():
            index, name = key.split(".", 1)
            current.optimizer.state[params[int(index)]][name] = value.to(device, copy=True)
        tensors = _scale_state(current.update.scale)
        tensors |= {f"carried.{i}": state for i, state in enumerate(current.buffers.states)}
        for name, tensor in tensors.items():
            if f"live.{name}" in rows:
                tensor.copy_(rows[f"live.{name}"])
        if "losses" in rows:
            losses = rows["losses"][: current.batches.num_steps]  # more with a smaller batch
            current.buffers.losses[: len(losses)].copy_(losses)

    def describe(self) -> dict[str, Any]:
        return {}

    def compact(self, places: Sequence[int]) -> SingleProgram:
        return self

    def kernels(self) -> list[str]:
        return self._step.kernels() if self._step else []

    def failures(self) -> dict[str, str]:
        return self._step.failures() if self._step else {}

    def capture_s(self) -> CaptureSeconds:
        return self._captured_s.add(self._step.capture_s() if self._step else CaptureSeconds())

    def close(self) -> None:
        if self._step is not None:
            self._step.close()


def _strip(rows: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in rows.items() if name.startswith(prefix)}


def _list_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _scale_state(scale: LossScale | None) -> dict[str, Tensor]:
    return {} if scale is None else {"scale": scale.scale, "since_growth": scale.since_growth}
