"""What this machine is, which techniques work on it, what the plan would prefer, what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slipstream import machine as hardware
from slipstream.doctor import gpus, inventory, techniques, trials
from slipstream.doctor.problems import find_problems

__all__ = ["examine", "find_problems"]


def examine(tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Look at the machine, try every technique, measure a plan: some 25 seconds.

    `tell` is given a line at the start of each part. What does not work is reported with its
    reason, and nothing that is tried can fail the rest.
    """
    say = tell or (lambda _: None)
    began = time.perf_counter()
    found: dict[str, Any] = {"machine": inventory.take_inventory()}
    device = hardware.choose_device("auto")
    say("trying what works here ...")
    found["techniques"] = techniques.try_in_process(device)
    say("compiling and starting workers, in processes of their own ...")
    found["techniques"] += techniques.try_isolated(device)
    say("measuring what the plan would prefer ...")
    found["plan"] = trials.measure_plan(device)
    held_back = gpus.read_throttling()  # once more, now that the device has worked
    for gpu in found["machine"]["gpus"]:
        more = set(held_back.get(gpu["uuid"], ())) - set(gpu["throttled"])
        gpu["throttled"] += sorted(more)
    found["problems"] = find_problems(found)
    found["seconds"] = time.perf_counter() - began
    return found
