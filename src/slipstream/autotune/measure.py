"""Chooses by measuring: times real steps of the candidates that make sense here.

Starts from the plan's rules of thumb and tries, one setting after the other, what they leave open;
whatever is faster and gives the same losses stays. What was found is kept on disk, by the job's
shape, the hardware and the versions.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import machine, runs
from slipstream.autotune import candidates
from slipstream.config import Config
from slipstream.engine import capture, optim, recovery
from slipstream.engine.plan import Plan
from slipstream.engine.single import SingleStep, TrainingTask, build_step
from slipstream.errors import UserError
from slipstream.models import OWN_KERNELS

MEASURE_LIMIT_S = 10.0
SHARE_OF_RUN = 0.05
TRIAL_S = 0.12
FIRST_TRIAL_S = 0.5
"""What a trial takes at least, with all that happens around its steps."""
NUM_STRETCHES = 3
"""A trial's time is that of its fastest stretch of steps."""
WORTHWHILE_RATIO = 0.97
"""A candidate replaces what is there if it takes less than this share of its time."""
SAME_LOSS = 0.01
"""How far a candidate's mean loss may be from the first one's."""
CHOICES = (
    *("precision", "cudnn", "threads", "onednn", "fused", "workers", "compile", "capture"),
    *("ms_per_step", "kernels", "evidence"),
)
SMALLEST_BATCH, LARGEST_BATCH = 32, 16384
PAYS = 1.1
"""How much faster a larger batch must be, since it takes fewer steps to learn in."""


def choose_plan(task: TrainingTask, plan: Plan) -> Plan:
    """The plan with what measuring found, from the cache or anew."""
    config = task.config
    if config.engine.plan == "off":
        return plan
    path, key = runs.get_cache_folder() / "plans.json", _key(task, plan)
    if SHARE_OF_RUN * guess_duration_s(task, plan) < FIRST_TRIAL_S:
        told = "rules of thumb: the steps are too few to measure"
        return replace(plan, reasons=plan.reasons | {"plan": told})
    plan = candidates.prefer_own_kernels(config, plan, guess_duration_s(task, plan))
    if config.engine.plan == "cached":
        known = _read(path).get(key)
        if known:
            choices = known["choices"] | {"cudnn": tuple(known["choices"]["cudnn"])}
            why = plan.reasons | {"plan": "measured before, for the same shapes and hardware"}
            return replace(plan, **choices, reasons=why | known["reasons"])
    began = time.perf_counter()
    decided, complete = _measured(task, plan)
    spent = time.perf_counter() - began
    reasons = decided.reasons | {"plan": f"measured in {spent:.1f} s"}
    decided = replace(decided, reasons=reasons)
    if complete and decided.micro_batch is None:  # else a neighbour may have had the memory
        changed = {k: v for k, v in reasons.items() if plan.reasons.get(k) != v and k != "plan"}
        choices = {name: getattr(decided, name) for name in CHOICES}
        _write(path, key, {"choices": choices, "reasons": changed})
    return decided


def estimate_duration(task: TrainingTask, plan: Plan) -> dict[str, Any]:
    """What training will take, validations aside, and whether that is measured or guessed."""
    if plan.ms_per_step is None:
        return {"expected_s": guess_duration_s(task, plan), "expected_is": "guessed"}
    num_steps = -(-task.dataset.num_windows["train"] // _effective(task.config))
    whole_s = plan.ms_per_step / 1e3 * num_steps * task.config.train.epochs
    return {"expected_s": whole_s, "expected_is": "measured"}


def guess_duration_s(task: TrainingTask, plan: Plan) -> float:
    """Seconds that training may take, very roughly: products, and calls that follow each other."""
    config = task.config
    spec = config.model.spec
    tokens = 1 if spec.flattens else config.data.context // config.model.patch
    calls = spec.count_calls(tokens) * len(config.model.sizes)
    windows = task.dataset.num_windows["train"] * config.train.epochs
    weights = sum(p.numel() for p in task.model.parameters())
    on_gpu = plan.device.type == "cuda"
    speed = 1e13 if on_gpu else 5e9 * machine.count_available_cores()
    step_s = 1e-4 + 5e-6 * calls if on_gpu else 1e-3 + 3e-4 * calls  # of the smallest model
    products = 6 * weights * tokens * windows * task.dataset.signature.sequences_per_window
    return products / speed + step_s * windows / _effective(config)


class StepMeasurement(NamedTuple):
    ms: float
    loss: float
    kernels: list[str]


def _measured(task: TrainingTask, plan: Plan) -> tuple[Plan, bool]:
    """The fastest plan that keeps the numbers, and whether there was time for all of it."""
    evidence: list[dict[str, Any]] = []
    reasons: dict[str, str] = {}
    began = time.perf_counter()
    machine.warm_up(plan.device)
    best = _tried(task, plan, "rules of thumb", evidence)
    if best is None and OWN_KERNELS in plan.cudnn and task.config.engine.cudnn == "auto":
        reasons["cudnn"] = f"as PyTorch chooses: our own kernels failed ({evidence[-1]['failed']})"
        plan = replace(plan, cudnn=candidates.use_persistent_cudnn(plan))
        best = _tried(task, plan, "cudnn = persistent", evidence)
    while best is None and evidence[-1]["out_of_memory"]:
        batch = plan.micro_batch or _batch(task.config)
        if batch == 1:
            break
        plan = replace(plan, micro_batch=-(-batch // 2))
        reasons["micro_batch"] = f"{batch} windows per pass did not fit"
        best = _tried(task, plan, f"{plan.micro_batch} windows per pass", evidence)
    if best is None:
        return replace(plan, evidence=evidence), False
    num_steps = -(-task.dataset.num_windows["train"] // _effective(task.config))
    share_s = SHARE_OF_RUN * best.ms / 1e3 * num_steps * task.config.train.epochs
    deadline = began + min(MEASURE_LIMIT_S, share_s)
    reference, cost = best.loss, TRIAL_S
    for candidate in candidates.list_candidates(task.config, plan):
        before, value = getattr(plan, candidate.setting), candidate.change(plan)
        if value == before:
            continue
        now = time.perf_counter()
        if now + max(cost, TRIAL_S) + candidate.takes_s > deadline:
            evidence.append({"candidate": candidate.name, "skipped": "no time left to measure"})
            continue
        other = replace(plan, **{candidate.setting: value}, **candidate.also)
        trial = _tried(task, other, candidate.name, evidence)
        cost = time.perf_counter() - now
        if trial is None:
            continue
        if candidate.name == "precision = fp32":
            reference = trial.loss
            if not _same(best.loss, reference):
                evidence[0]["refused"] = f"loss {best.loss:.4g} instead of {reference:.4g}"
                reasons["precision"] = f"{before} gave other losses"
                plan, best = other, trial
                continue
        if not _same(trial.loss, reference):
            evidence[-1]["refused"] = f"loss {trial.loss:.4g} instead of {reference:.4g}"
        elif trial.ms < WORTHWHILE_RATIO * best.ms:
            reasons[candidate.setting] = f"measured, {best.ms / trial.ms:.2g}x as fast as {before}"
            plan, best = other, trial
    decided = replace(
        plan,
        ms_per_step=best.ms,
        kernels=best.kernels,
        evidence=evidence,
        reasons=plan.reasons | reasons,
    )
    return decided, share_s >= MEASURE_LIMIT_S or not any("skipped" in item for item in evidence)


def _same(loss: float, reference: float) -> bool:
    return math.isclose(loss, reference, rel_tol=SAME_LOSS)


def _tried(
    task: TrainingTask, plan: Plan, name: str, evidence: list[dict[str, Any]]
) -> StepMeasurement | None:
    """A candidate's time, losses and kernels; None, and why, if it fails."""
    try:
        trial = _trial(task, plan)
    except Exception as error:
        if not isinstance(error, recovery.MEMORY_ERRORS) and OWN_KERNELS not in plan.cudnn:
            raise  # a compiler of kernels may raise anything
        why = recovery.first_line(error)
        full = recovery.is_out_of_memory(error)
        evidence.append({"candidate": name, "failed": why, "out_of_memory": full})
        return None
    finally:
        recovery.free_memory()
    evidence.append({"candidate": name, "ms": trial.ms})
    return trial


def _trial(task: TrainingTask, plan: Plan) -> StepMeasurement:
    """Train a copy of the model for a moment."""
    trial = replace(task, model=copy.deepcopy(task.model))
    with plan.flags():
        job = build_step(trial, plan)
        try:
            warm_up = capture.EAGER_FIRST + 1 if plan.device.type == "cuda" else 1
            time_first_steps(job, task.config, warm_up)
            losses = job.buffers.losses[:warm_up].clone()  # the same steps for every candidate
            once = time_first_steps(job, task.config, 1)
            most = min(100, job.batches.num_steps)
            steps = max(1, min(most, int(TRIAL_S / NUM_STRETCHES / max(once, 1e-6))))
            spent = min(time_first_steps(job, task.config, steps) for _ in range(NUM_STRETCHES))
            if job.failures():
                raise RuntimeError("; ".join(job.failures().values()))
            kernels = job.kernels()
            return StepMeasurement(1e3 * spent / steps, float(losses.double().mean()), kernels)
        finally:
            job.close()


def time_first_steps(job: SingleStep, config: Config, steps: int) -> float:
    """Seconds for so many steps of the first epoch, which is laid out before the clock starts."""
    steps = min(steps, job.batches.num_steps)
    job.batches.start_epoch(0)
    job.buffers.begin(optim.compute_lrs(config.train, 0, job.batches.num_steps), first=0)
    machine.synchronize(job.plan.device)
    began = time.perf_counter()
    for _ in range(steps):
        job.advance()
    job.flush()
    machine.synchronize(job.plan.device)
    return time.perf_counter() - began


def _batch(config: Config) -> int:
    assert config.train.batch != "auto"
    return config.train.batch


def _effective(config: Config) -> int:
    return _batch(config) * config.train.accumulate


def find_batch_size(task: TrainingTask, plan: Plan) -> tuple[int, list[dict[str, Any]]]:
    """The batch with the most windows a second: doubled while it fits and pays, then bisected.

    Every size is tried with whole steps, the optimizer's state included.
    """
    evidence: list[dict[str, Any]] = []
    most = min(LARGEST_BATCH, task.dataset.num_windows["train"])

    def speed(batch: int) -> float:
        train = task.config.train.model_copy(update={"batch": batch})
        sized = replace(task, config=task.config.model_copy(update={"train": train}))
        found = _tried(sized, plan, f"batch = {batch}", evidence)
        return batch / found.ms if found else 0.0

    known = machine.find_gpu_hint(plan.hardware.get("gpu", ""))
    best, fastest, batch = 0, 0.0, min(known.batch // 4 if known else SMALLEST_BATCH, most)
    while batch <= most:
        found = speed(batch)
        if not found:  # it does not fit: what lies between may
            low, high = best, batch
            while high - low > max(low // 4, 1):
                middle = (low + high) // 2
                found = speed(middle)
                low, high = (middle, high) if found else (low, middle)
                if found > PAYS * fastest:
                    best, fastest = middle, found
            break
        if found < PAYS * fastest:
            break
        best, fastest, batch = batch, found, 2 * batch
    if not best:
        raise UserError(
            "not even one window fits; what is left to try: "
            f"{recovery.suggest_remedies(task.config)}"
        )
    return best, evidence


def _key(task: TrainingTask, plan: Plan) -> str:
    """What a plan's speed depends on."""
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
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    """The cache; one that cannot be read is as good as none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, key: str, value: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write_json(path, _read(path) | {key: value})
    except OSError:
        pass  # a cache that cannot be written costs the next run a few seconds
