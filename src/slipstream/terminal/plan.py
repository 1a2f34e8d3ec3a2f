"""A run's plan in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def describe_plan(plan: dict[str, Any], num_steps: int, expected_s: float) -> Iterator[str]:
    """Yield what will run, why, and how long it will take."""
    from slipstream.reporting import format_seconds

    device_name = plan["hardware"].get("gpu", plan["hardware"]["cpu"])
    reasons = plan["reasons"]
    yield f"plan: {plan['device']} ({device_name}); data: {plan['home']} ({reasons['home']})"
    choices = [plan["precision"] + _format_gain(plan, "precision = fp32", "fp32", "precision")]
    if plan["device"] == "cpu":
        choices.append(f"{plan['threads']} threads ({reasons['threads']})")
    else:
        if plan["cudnn"]:
            choices.append(describe_kernels(plan))
        captured = "step captured" if plan["capture"] else "step eager"
        choices.append(captured + _format_gain(plan, "capture = False", "eager", "capture"))
    if plan["micro_batch"]:
        choices.append(f"{plan['micro_batch']} windows per pass ({reasons['micro_batch']})")
    yield f"plan: {'; '.join(choices)}"
    why = f"; {reasons['plan']}" if "plan" in reasons else ""
    if plan["ms_per_step"] is not None:
        speed = f"{plan['ms_per_step']:.3g} ms a step, at most {format_seconds(expected_s)}"
        yield f"plan: {speed} for {num_steps:,} steps{why}"
    else:
        duration = f"about {format_seconds(expected_s)}" if expected_s >= 1 else "under a second"
        yield f"plan: {duration} for {num_steps:,} steps (rule of thumb){why}"
    for item in plan["evidence"]:
        if "failed" in item or "refused" in item:
            yield f"plan: not {item['candidate']}: {item.get('failed') or item.get('refused')}"


def describe_kernels(plan: dict[str, Any]) -> str:
    """Name the recurrent kernels: ours, or cuDNN's algorithms, as measured where known."""
    reason = plan["reasons"]["cudnn"]
    if "off" in plan["cudnn"]:
        return f"our own recurrent kernels ({reason})"
    ran = "persistent" if any("Persist" in name for name in plan["kernels"]) else "standard"
    names = {ran} if plan["kernels"] else set(plan["cudnn"])
    return f"cuDNN {' and '.join(sorted(names))} ({reason})"


def _format_gain(plan: dict[str, Any], candidate: str, name: str, setting: str) -> str:
    """Format the speed-up over a candidate where it was measured, else the choice's reason."""
    for item in plan["evidence"]:
        if item["candidate"] == candidate and "ms" in item:
            ratio = item["ms"] / plan["ms_per_step"]
            return f", {ratio:.2g}x over {name}" if ratio > 1 else ""
    return f" ({plan['reasons'][setting]})"
