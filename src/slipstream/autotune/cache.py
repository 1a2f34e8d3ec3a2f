"""Keep measured plans on disk, by the shape of the job, the hardware and the versions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask

CHOICES = (
    *("precision", "cudnn", "threads", "onednn", "fused", "workers", "compile", "capture"),
    *("ms_per_step", "kernels", "evidence"),
)
"""The fields of a plan that measuring decides"""


def get_path() -> Path:
    return runs.get_cache_folder() / "plans.json"


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
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]


def read_plan(key: str, plan: Plan) -> Plan | None:
    """Return the plan with the choices that were measured before; None if there are none."""
    saved = _read_all().get(key)
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
    path = get_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write_json(path, _read_all() | {key: {"choices": choices, "reasons": reasons}})
    except OSError:
        pass  # a cache that cannot be written costs the next run a few seconds


def _read_all() -> dict[str, Any]:
    """Return the whole cache; empty if it cannot be read."""
    try:
        saved = json.loads(get_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}
