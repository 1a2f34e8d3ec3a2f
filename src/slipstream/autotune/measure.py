"""Choose a plan by timing real steps of the candidates that make sense here.

The search starts from the rules of thumb and tries, one setting after the other, what they leave
open; a candidate that is faster and gives the same losses replaces what is there.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream import machine
from slipstream.autotune import cache, candidates
from slipstream.autotune.candidates import PlanCandidate
from slipstream.autotune.duration import count_steps, guess_duration_s
from slipstream.autotune.timing import (
    OUT_OF_TIME,
    TRIAL_S,
    WORTHWHILE_RATIO,
    StepMeasurement,
    try_plan,
)
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.models import OWN_KERNELS

MEASURE_LIMIT_S = 10.0
SHARE_OF_RUN = 0.05
"""Measuring may take this share of the training, and no more than the limit"""
FIRST_TRIAL_S = 0.5
"""The least time that a trial takes, with everything around its steps"""
SAME_LOSS = 0.01
"""How far a candidate's mean loss may be from the first one's"""


def choose_plan(task: TrainingTask, plan: Plan) -> Plan:
    """Return the plan with what measuring decides, from the cache or measured now."""
    config = task.config
    if config.engine.plan == "off":
        return plan
    guessed_s = guess_duration_s(task, plan)
    if SHARE_OF_RUN * guessed_s < FIRST_TRIAL_S:
        reason = "rules of thumb: the steps are too few to measure"
        return replace(plan, reasons=plan.reasons | {"plan": reason})
    key = cache.compute_key(task, plan)
    rules = candidates.prefer_own_kernels(config, plan, guessed_s)
    if config.engine.plan == "cached" and (saved := cache.read_plan(key, rules)):
        return saved
    started_at = time.perf_counter()
    measured, is_complete = measure_plan(task, rules)
    reason = f"measured in {time.perf_counter() - started_at:.1f} s"
    measured = replace(measured, reasons=measured.reasons | {"plan": reason})
    if is_complete and measured.micro_batch is None:  # else a neighbour may have had the memory
        cache.write_plan(key, measured, rules)
    return measured


def measure_plan(task: TrainingTask, rules: Plan) -> tuple[Plan, bool]:
    """Return the fastest plan that keeps the losses, and whether every candidate had its time."""
    started_at = time.perf_counter()
    machine.warm_up(rules.device)
    search = PlanSearch(task, rules)
    best = search.measure_start()
    if best is None:
        return replace(search.plan, evidence=search.evidence), False
    share_s = SHARE_OF_RUN * best.ms / 1e3 * count_steps(task) * task.config.train.epochs
    deadline = started_at + min(MEASURE_LIMIT_S, share_s)
    for candidate in candidates.list_candidates(task.config, search.plan):
        best = search.try_candidate(candidate, best, deadline)
    measured = replace(
        search.plan,
        ms_per_step=best.ms,
        kernels=best.kernels,
        evidence=search.evidence,
        reasons=search.plan.reasons | search.reasons,
    )
    skipped = any("skipped" in item for item in search.evidence)
    return measured, share_s >= MEASURE_LIMIT_S or not skipped


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

    def measure_start(self) -> StepMeasurement | None:
        """Measure the rules of thumb; where they fail, without our kernels, then in smaller
        passes. None if nothing works."""
        result = self._try("rules of thumb")
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
            self.reasons["micro_batch"] = f"{batch} windows per pass did not fit"
            result = self._try(f"{self.plan.micro_batch} windows per pass")
        if result is not None:
            self.reference_loss = result.loss
        return result

    def _try(self, name: str) -> StepMeasurement | None:
        return try_plan(self.task, self.plan, name, self.evidence)

    def try_candidate(
        self, candidate: PlanCandidate, best: StepMeasurement, deadline: float
    ) -> StepMeasurement:
        """Take the candidate if it is worth it, and return the best measurement."""
        before, value = getattr(self.plan, candidate.setting), candidate.change(self.plan)
        if value == before:
            return best
        started_at = time.perf_counter()
        if started_at + max(self.trial_s, TRIAL_S) + candidate.setup_s > deadline:
            self.evidence.append({"candidate": candidate.name, "skipped": OUT_OF_TIME})
            return best
        other = replace(self.plan, **{candidate.setting: value}, **candidate.also)
        result = try_plan(self.task, other, candidate.name, self.evidence)
        self.trial_s = time.perf_counter() - started_at
        if result is None:
            return best
        if candidate.name == "precision = fp32":
            self.reference_loss = result.loss
            if not self._has_same_loss(best):
                self.evidence[0]["refused"] = self._explain_loss(best)
                self.reasons["precision"] = f"{before} gave other losses"
                self.plan = other
                return result
        if not self._has_same_loss(result):
            self.evidence[-1]["refused"] = self._explain_loss(result)
        elif result.ms < WORTHWHILE_RATIO * best.ms:
            speedup = f"{best.ms / result.ms:.2g}x as fast as {before}"
            self.reasons[candidate.setting] = f"measured, {speedup}"
            self.plan = other
            return result
        return best

    def _has_same_loss(self, result: StepMeasurement) -> bool:
        return math.isclose(result.loss, self.reference_loss, rel_tol=SAME_LOSS)

    def _explain_loss(self, result: StepMeasurement) -> str:
        return f"loss {result.loss:.4g} instead of {self.reference_loss:.4g}"
