"""Choose a plan by timing real steps of the candidates that make sense here.

The search starts from the rules of thumb and tries, one setting after the other, what they leave
open; a candidate that is faster and gives the same losses replaces what is there. Measured plans
stay on disk, by the shape of the job, the hardware and the versions.
"""

import hashlib
import json
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream import machine, runs
from slipstream.autotune import candidates
from slipstream.autotune.candidates import PlanCandidate
from slipstream.autotune.timing import (
    OUT_OF_TIME,
    TRIAL_S,
    WORTHWHILE_RATIO,
    StepMeasurement,
    count_steps,
    guess_duration_s,
    guess_step_s,
    try_plan,
)
from slipstream.config import Config
from slipstream.engine import recovery
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.errors import UserError
from slipstream.kernels import find_compiler
from slipstream.machine import CpuLoad
from slipstream.models import OWN_KERNELS
from slipstream.text import format_count, format_ms, format_number, format_speedup

MEASURE_LIMIT_S = 10.0
SHARE_OF_RUN = 0.05
"""Measuring may take this share of the training, and no more than the limit"""
FIRST_TRIAL_S = 0.5
"""The least time that a trial takes, with everything around its steps"""
SAME_LOSS = 0.01
"""How far a candidate's mean loss may be from the first one's"""
START = "rules of thumb"
CACHE = "plans.json"
BUSY = "load"
"""The reason of a plan that was measured while other processes used the cores"""
CHOICES = (
    *("precision", "cudnn", "threads", "onednn", "fused", "workers", "compile", "capture"),
    *("ms_per_step", "kernels", "evidence"),
)
"""The fields of a plan that measuring decides"""
BUSY_RATIO = 0.8
"""On a busy machine, times vary: more threads, or PyTorch's layers instead of our kernels, must
take less than this share of the best time"""
MIN_BATCH, MAX_BATCH = 32, 16384
WORTHWHILE_SPEEDUP = 1.1
"""How much faster a larger batch must be, since it takes fewer steps to learn in"""


def choose_plan(task: TrainingTask, plan: Plan) -> Plan:
    """Return the plan with what measuring decides, from the cache or measured now."""
    config = task.config
    if config.engine.plan == "off":
        return plan
    guessed_s = limit_duration(config, guess_duration_s(task, plan))
    key = compute_key(task, plan)
    rules = candidates.prefer_own_kernels(config, plan, guessed_s)
    if config.engine.plan == "cached" and (saved := read_plan(key, rules)):
        return saved
    if SHARE_OF_RUN * guessed_s < FIRST_TRIAL_S:
        reason = "rules of thumb: the steps are too few to measure"
        return replace(rules, reasons=rules.reasons | {"plan": reason})
    started_at = time.perf_counter()
    measured, is_complete = measure_plan(task, rules)
    reason = f"measured in {time.perf_counter() - started_at:.1f} s"
    measured = replace(measured, reasons=measured.reasons | {"plan": reason})
    # another process may have had the memory or the cores, which the next run then has
    was_busy = config.engine.threads == "auto" and BUSY in measured.reasons
    if is_complete and measured.micro_batch is None and not was_busy:
        write_plan(key, measured, rules)
    return measured


def limit_duration(config: Config, seconds: float) -> float:
    """Return how long a training of so many seconds takes within `train.minutes`."""
    minutes = config.train.minutes
    return seconds if minutes is None else min(seconds, 60 * minutes)


def measure_plan(task: TrainingTask, rules: Plan) -> tuple[Plan, bool]:
    """Return the fastest plan that keeps the losses, and whether every candidate had its time."""
    started_at, usage = time.perf_counter(), machine.read_cpu_usage()
    machine.warm_up(rules.device)
    first = candidates.prefer_one_thread(task.config, rules, guess_step_s(task, rules, 1))
    search = PlanSearch(task, first)
    best = search.measure_start(START if first is rules else f"{START}, threads = {first.threads}")
    if rules.device.type == "cpu":
        search.record_load(machine.compute_load(usage, machine.read_cpu_usage()))
    if best is None:
        return replace(search.plan, evidence=search.evidence), False
    all_s = best.ms / 1e3 * count_steps(task) * task.config.train.max_epochs
    search.run_s = limit_duration(task.config, all_s)
    share_s = SHARE_OF_RUN * search.run_s
    deadline = started_at + min(MEASURE_LIMIT_S, share_s)
    for candidate in candidates.list_candidates(task.config, search.plan):
        best = search.try_candidate(candidate, best, deadline)
    skipped = any("skipped" in item for item in search.evidence)
    is_complete = share_s >= MEASURE_LIMIT_S or not skipped
    if first.threads != rules.threads and "threads" not in search.reasons:
        return search.leave_threads_to_rules(rules, best), is_complete
    return search.summarize(best), is_complete


@dataclass
class PlanSearch:
    """The fastest plan so far, and what was tried."""

    task: TrainingTask
    plan: Plan
    evidence: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    reference_loss: float = math.nan
    trial_s: float = TRIAL_S
    """What the last trial took"""
    load: CpuLoad | None = None
    """Of the other processes, where it was measured"""
    run_s: float = math.inf
    """What training takes with the first plan"""

    def summarize(self, best: StepMeasurement) -> Plan:
        """Return the fastest plan with its time, its reasons and everything that was tried."""
        return replace(
            self.plan,
            ms_per_step=best.ms,
            kernels=best.kernels,
            reasons=self.plan.reasons | self.reasons,
            evidence=self.evidence,
        )

    def leave_threads_to_rules(self, rules: Plan, best: StepMeasurement) -> Plan:
        """Return the plan where only one thread was timed: it stays on a busy machine only."""
        plan = self.summarize(best)
        reason = f"more were {OUT_OF_TIME}"
        if BUSY in plan.reasons:
            return replace(plan, reasons=plan.reasons | {"threads": reason})
        reason = f"{rules.reasons['threads']}; {OUT_OF_TIME}"
        reasons = plan.reasons | {"threads": reason}
        return replace(plan, threads=rules.threads, ms_per_step=None, reasons=reasons)

    def record_load(self, load: CpuLoad | None) -> None:
        """Record how busy the machine is, for the choice of threads and for the reader."""
        self.load = load
        if load is not None and load.is_busy:
            self.reasons[BUSY] = f"the machine is busy: {load.describe()}"

    def measure_start(self, name: str) -> StepMeasurement | None:
        """Measure the first plan; where it fails, without our kernels, then in smaller passes. None
        if nothing works."""
        result = self._try(name)
        is_free = self.task.config.engine.cudnn == "auto"
        if result is None and OWN_KERNELS in self.plan.cudnn and is_free:
            failure = self.evidence[-1]["failed"]
            self.reasons["cudnn"] = f"as PyTorch chooses: our own kernels failed ({failure})"
            self.plan = replace(self.plan, cudnn=candidates.use_persistent_cudnn(self.plan))
            result = self._try("cudnn = persistent")
        while result is None and self.evidence[-1]["out_of_memory"]:
            batch = self.plan.micro_batch or self.task.config.train.batch
            assert batch != "auto"
            if batch == 1:
                return None
            self.plan = replace(self.plan, micro_batch=-(-batch // 2))
            self.reasons["micro_batch"] = f"{format_count(batch, 'window')} per pass did not fit"
            result = self._try(f"{format_count(self.plan.micro_batch or 0, 'window')} per pass")
        if result is not None:
            self.reference_loss = result.loss
        return result

    def _try(self, name: str) -> StepMeasurement | None:
        return try_plan(self.task, self.plan, name, self.evidence)

    def try_candidate(
        self, candidate: PlanCandidate, best: StepMeasurement, deadline: float
    ) -> StepMeasurement:
        """Take the candidate if it is worth it, and return the best measurement."""
        value = candidate.change(self.plan)
        if value == getattr(self.plan, candidate.setting):
            return best
        started_at, needed_s = time.perf_counter(), max(self.trial_s, TRIAL_S) + candidate.setup_s
        if needed_s > max(deadline - started_at, self.compute_allowance(candidate)):
            self.evidence.append({"candidate": candidate.name, "skipped": OUT_OF_TIME})
            return best
        other = replace(self.plan, **{candidate.setting: value}, **candidate.also)
        limit_ms = best.ms if other.device.type == "cpu" else math.inf
        result = try_plan(self.task, other, candidate.name, self.evidence, best_ms=limit_ms)
        self.trial_s = time.perf_counter() - started_at
        return best if result is None else self.decide(candidate, other, best, result)

    def decide(
        self,
        candidate: PlanCandidate,
        other: Plan,
        best: StepMeasurement,
        result: StepMeasurement,
    ) -> StepMeasurement:
        """Take the other plan if its measurement is worth it, and return the best measurement."""
        before = getattr(self.plan, candidate.setting)
        if candidate.name == "precision = fp32":
            self.reference_loss = result.loss
            if refusal := self._refuse_loss(best.loss):
                self.evidence[0]["refused"] = refusal
                self.reasons["precision"], self.plan = f"{before} gave other losses", other
                return result
        if refusal := self._refuse_loss(result.loss):
            self.evidence[-1]["refused"] = refusal
        elif result.ms < self._get_worthwhile_ratio(other) * best.ms:
            slower = candidates.describe_value(candidate.setting, before)
            reason = format_speedup(slower, best.ms, result.ms)
            self.reasons |= dict.fromkeys([candidate.setting, *candidate.also], reason)
            self.plan = other
            return result
        elif candidate.setting == "threads":
            figures = f"{format_ms(best.ms)} a step, {format_number(result.ms, figures=3)} with"
            threads = format_count(other.threads, "thread")
            self.reasons["threads"] = f"{figures} {threads}"
        return best

    def compute_allowance(self, candidate: PlanCandidate) -> float:
        """Return the seconds that a trial may take whatever the others took: a share of what the
        candidate can save at most, which is nothing on a busy machine."""
        if self.load is not None and self.load.is_busy:
            return 0.0
        saved_s = self.run_s * (1 - 1 / candidate.most_gain)
        return min(2 * SHARE_OF_RUN * saved_s, MEASURE_LIMIT_S)

    def _get_worthwhile_ratio(self, other: Plan) -> float:
        """Return the share of the best time that a plan must stay below."""
        is_busy = self.load is not None and self.load.is_busy_for(other.threads)
        leaves_kernels = bool(self.plan.native_kernels) and not other.native_kernels
        is_unlikely = other.threads > self.plan.threads or leaves_kernels
        return BUSY_RATIO if is_busy and is_unlikely else WORTHWHILE_RATIO

    def _refuse_loss(self, loss: float) -> str | None:
        """Say how a loss differs from the reference; None if it does not."""
        if math.isclose(loss, self.reference_loss, rel_tol=SAME_LOSS):
            return None
        return f"loss {loss:.4g} instead of {self.reference_loss:.4g}"


def compute_key(task: TrainingTask, plan: Plan) -> str:
    """Return a hash of everything that a plan's speed depends on."""
    config = task.config
    shape = {
        "model": config.model.model_dump(),
        "data": config.data.model_dump(include={"context", "horizon", "channels"}),
        "train": config.train.model_dump(
            include={"batch", "accumulate", "optimizer", "loss", "quantiles", "clip", "init_from"}
        ),
        "random": [
            config.augment.kinds,
            config.augment.cache,
            config.pretrain.mask if config.masked else None,
        ],
        "engine": config.engine.model_dump(exclude={"plan", "log_every", "monitor"}),
        "signature": task.dataset.signature.model_dump(exclude={"step"}),
        "home": plan.home,
        "hardware": plan.hardware,
        "compiler": plan.device.type == "cpu" and find_compiler() is not None,
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]


def read_plan(key: str, plan: Plan) -> Plan | None:
    """Return the plan with the choices that were measured before; None if there are none."""
    saved = read_cache(key)
    if not saved:
        return None
    choices = saved["choices"] | {"cudnn": tuple(saved["choices"]["cudnn"])}
    reasons = plan.reasons | {"plan": "measured before, for the same shapes and hardware"}
    return replace(plan, **choices, reasons=reasons | saved["reasons"])


def write_plan(key: str, plan: Plan, rules: Plan) -> None:
    """Save a measured plan and its reasons, as far as they differ from the rules of thumb."""
    reasons = {
        name: reason
        for name, reason in plan.reasons.items()
        if rules.reasons.get(name) != reason and name != "plan"
    }
    choices = {name: getattr(plan, name) for name in CHOICES}
    write_cache(key, {"choices": choices, "reasons": reasons})


def read_cache(key: str) -> dict[str, Any] | None:
    """Return what was saved under a key; None if nothing was."""
    saved = _read_all().get(key)
    return saved if isinstance(saved, dict) else None


def write_cache(key: str, entry: dict[str, Any]) -> None:
    """Save an entry under a key."""
    path = runs.get_cache_folder() / CACHE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write_json(path, _read_all() | {key: entry})
    except OSError:
        pass  # a cache that cannot be written costs the next run a few seconds


def _read_all() -> dict[str, Any]:
    """Return the whole cache; empty if it cannot be read."""
    try:
        saved = json.loads((runs.get_cache_folder() / CACHE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def set_batch_size(config: Config, batch: int) -> Config:
    """Return the config with this batch size."""
    return config.model_copy(update={"train": config.train.model_copy(update={"batch": batch})})


def find_batch_size(task: TrainingTask, plan: Plan) -> tuple[int, list[dict[str, Any]]]:
    """Double the batch while it fits and is worth it, then bisect; return it and the evidence.

    Every size is tried with whole steps, the optimizer's state included.
    """
    evidence: list[dict[str, Any]] = []
    limit = min(MAX_BATCH, task.dataset.num_windows["train"])

    def measure_speed(batch: int) -> float:
        """Return windows per millisecond; 0 if the batch does not fit."""
        sized = replace(task, config=set_batch_size(task.config, batch))
        result = try_plan(sized, plan, f"batch = {batch}", evidence)
        return batch / result.ms if result else 0.0

    hint = machine.find_gpu_hint(plan.hardware.get("gpu", ""))
    best, fastest, batch = 0, 0.0, min(hint.batch // 4 if hint else MIN_BATCH, limit)
    while batch <= limit:
        speed = measure_speed(batch)
        if not speed:  # a batch between the last one and this one may fit
            low, high = best, batch
            while high - low > max(low // 4, 1):
                middle = (low + high) // 2
                speed = measure_speed(middle)
                low, high = (middle, high) if speed else (low, middle)
                if speed > WORTHWHILE_SPEEDUP * fastest:
                    best, fastest = middle, speed
            break
        if speed < WORTHWHILE_SPEEDUP * fastest:
            break
        best, fastest, batch = batch, speed, 2 * batch
    if not best:
        remedies = recovery.suggest_remedies(task.config)
        raise UserError(f"out of memory with a single window per pass; try {remedies}")
    return best, evidence
