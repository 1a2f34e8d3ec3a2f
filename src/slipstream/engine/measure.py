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
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream import hardware, runs
from slipstream.config import Config
from slipstream.engine import loop, optim, recover, step
from slipstream.engine.loop import Job, Task
from slipstream.engine.plan import RECURRENT, Plan
from slipstream.errors import UserError

LONGEST_S = 10.0
SHARE_OF_RUN = 0.05
TRIAL_S = 0.12
WORTH = 0.97
"""A candidate replaces what is there if it takes less than this share of its time."""
SAME_LOSS = 0.01
"""How far a candidate's mean loss may be from the first one's."""
CHOICES = ("precision", "cudnn", "threads", "onednn", "ms_per_step", "evidence")
SMALLEST_BATCH, LARGEST_BATCH = 32, 16384
PAYS = 1.1
"""How much faster a larger batch must be, since it takes fewer steps to learn in."""


def decide(task: Task, plan: Plan) -> Plan:
    """The plan with what measuring found, from the cache or anew."""
    config = task.config
    if config.engine.plan == "off":
        return plan
    path, key = _cache_path(), _key(task, plan)
    if config.engine.plan == "cached":
        known = _read(path).get(key)
        if known:
            why = plan.reasons | {"plan": "measured before, for the same shapes and hardware"}
            return replace(plan, **known["choices"], reasons=why | known["reasons"])
    began = time.perf_counter()
    decided = _measured(task, plan)
    spent = time.perf_counter() - began
    reasons = decided.reasons | {"plan": f"measured in {spent:.1f} s"}
    decided = replace(decided, reasons=reasons)
    if decided.ms_per_step is not None and not any("skipped" in e for e in decided.evidence):
        changed = {k: v for k, v in reasons.items() if plan.reasons.get(k) != v and k != "plan"}
        choices = {name: getattr(decided, name) for name in CHOICES}
        _write(path, key, {"choices": choices, "reasons": changed})
    return decided


def _measured(task: Task, plan: Plan) -> Plan:
    evidence: list[dict[str, Any]] = []
    first = _tried(task, plan, "rules of thumb", evidence)
    if first is None:
        return replace(plan, evidence=evidence)
    ms, reference = first
    num_steps = -(-task.dataset.count["train"] // _effective(task.config))
    expected_s = ms / 1e3 * num_steps * task.config.train.epochs
    deadline = time.perf_counter() + min(LONGEST_S, SHARE_OF_RUN * expected_s)
    cost = 0.0
    reasons: dict[str, str] = {}
    for setting, values in _open_questions(task.config, plan):
        for value in values:
            if value == getattr(plan, setting):
                continue
            name = f"{setting} = {value}"
            began = time.perf_counter()
            if began + max(cost, TRIAL_S) > deadline:
                evidence.append({"candidate": name, "skipped": "no time left to measure"})
                continue
            trial = replace(plan, **{setting: value})
            found = _tried(task, trial, name, evidence)
            cost = time.perf_counter() - began
            if found is None:
                continue
            if not math.isclose(found[1], reference, rel_tol=SAME_LOSS):
                evidence[-1]["refused"] = f"loss {found[1]:.4g} instead of {reference:.4g}"
            elif found[0] < WORTH * ms:
                before = getattr(plan, setting)
                reasons[setting] = f"measured, {ms / found[0]:.2g}x as fast as {before}"
                plan, ms = trial, found[0]
    return replace(plan, ms_per_step=ms, evidence=evidence, reasons=plan.reasons | reasons)


def _open_questions(config: Config, plan: Plan) -> Iterator[tuple[str, list[Any]]]:
    """Settings that the config leaves open, each with the values worth a try, likely ones first."""
    engine, recurrent = config.engine, config.model.kind in RECURRENT
    if plan.device.type == "cuda":
        if engine.precision == "auto":
            known = hardware.hint(plan.hardware["gpu"])
            half = ["fp16", "bf16"] if known and known.half == "fp16" else ["bf16", "fp16"]
            if recurrent:  # cuDNN's bf16 recurrence has no persistent kernels
                half = ["fp16"]
            yield "precision", [*(["tf32"] if hardware.has_tf32(plan.device) else []), *half]
        if engine.cudnn == "auto" and recurrent:
            yield "cudnn", ["standard"]
        return
    if engine.threads == "auto":
        cores = hardware.available_cores()
        yield "threads", sorted({1, max(cores // 2, 1), cores})
    if recurrent:
        yield "onednn", [True, False]
    if engine.precision == "auto" and hardware.has_fast_bf16():
        yield "precision", ["bf16"]


def _tried(
    task: Task, plan: Plan, name: str, evidence: list[dict[str, Any]]
) -> tuple[float, float] | None:
    """Milliseconds per step and mean loss of a candidate; None, and why, if it fails."""
    try:
        ms, loss = _trial(task, plan)
    except RuntimeError as error:
        why = str(error).strip().split("\n", 1)[0]
        evidence.append({"candidate": name, "failed": why})
        return None
    finally:
        recover.free_memory()
    evidence.append({"candidate": name, "ms": ms})
    return ms, loss


def _trial(task: Task, plan: Plan) -> tuple[float, float]:
    """Train a copy of the model for a moment."""
    trial = replace(task, model=copy.deepcopy(task.model))
    device = [plan.device] if plan.device.type == "cuda" else []
    with plan.flags(), torch.random.fork_rng(device):
        torch.manual_seed(task.config.seed)
        job = loop.set_up(trial, plan)
        try:
            warm_up = step.EAGER_FIRST + 1 if plan.capture else 1
            _run(job, task.config, warm_up)
            once = _run(job, task.config, 1)
            steps = max(1, min(60, int(TRIAL_S / 2 / max(once, 1e-6))))
            spent = min(_run(job, task.config, steps) for _ in range(2))
            losses = job.tape.losses[: min(warm_up, len(job.tape.losses))]
            if job.failures():
                raise RuntimeError("; ".join(job.failures().values()))
            return 1e3 * spent / steps, float(losses.double().mean())
        finally:
            job.close()


def _run(job: Job, config: Config, steps: int) -> float:
    """Seconds for so many steps, which go round within the first epoch."""
    num_steps = job.home.num_steps
    _wait(job.plan)
    began = time.perf_counter()
    for i in range(steps):
        if i % num_steps == 0:
            job.home.begin(0)
            job.tape.begin(optim.rates(config.train, 0, num_steps))
        job.advance()
    job.flush()
    _wait(job.plan)
    return time.perf_counter() - began


def _wait(plan: Plan) -> None:
    if plan.device.type == "cuda":
        torch.cuda.synchronize(plan.device)


def _effective(config: Config) -> int:
    assert config.train.batch != "auto"
    return config.train.batch * config.train.accumulate


def find_batch(task: Task, plan: Plan) -> tuple[int, list[dict[str, Any]]]:
    """The batch with the most windows a second: doubled while it fits and pays, then bisected.

    Every size is tried with whole steps, the optimizer's state included.
    """
    evidence: list[dict[str, Any]] = []
    most = min(LARGEST_BATCH, task.dataset.count["train"])

    def speed(batch: int) -> float:
        train = task.config.train.model_copy(update={"batch": batch})
        sized = replace(task, config=task.config.model_copy(update={"train": train}))
        found = _tried(sized, plan, f"batch = {batch}", evidence)
        return batch / found[0] if found else 0.0

    known = hardware.hint(plan.hardware.get("gpu", ""))
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
            f"not even one window fits; what is left to try: {recover.remedies(task.config)}"
        )
    return best, evidence


def _cache_path() -> Path:
    home = os.environ.get("SLIPSTREAM_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "slipstream" / "plans.json"


def _key(task: Task, plan: Plan) -> str:
    """What a plan's speed depends on."""
    config = task.config
    shape = {
        "model": config.model.model_dump(),
        "data": config.data.model_dump(include={"context", "horizon", "channels"}),
        "train": config.train.model_dump(
            include={"batch", "accumulate", "optimizer", "loss", "quantiles", "clip"}
        ),
        "engine": config.engine.model_dump(exclude={"plan", "log_every"}),
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
