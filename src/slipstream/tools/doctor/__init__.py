"""Examines the machine: its inventory, the techniques that work, the plan, and problems; a job: its
data, its settings, and what would help."""

import time
from collections.abc import Callable
from typing import Any

from slipstream.base import machine, nvml
from slipstream.tools.doctor import inventory, techniques, trials
from slipstream.tools.doctor.problems import find_problems
from slipstream.tools.doctor.trials import examine_job

__all__ = ["examine", "examine_job", "find_problems"]


def examine(tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Take the inventory, try every technique and measure a plan, in about 25 seconds.

    `tell` receives a line at the start of each part. A technique that fails is reported with
    its reason, and no trial can make another one fail.
    """
    say = tell or (lambda _: None)
    start = time.perf_counter()
    result: dict[str, Any] = {"machine": inventory.take_inventory()}
    device = machine.choose_device("auto")
    say("trying what works here ...")
    usage = machine.read_cpu_usage()
    result["techniques"] = techniques.try_in_process(device)
    load = machine.compute_load(usage, machine.read_cpu_usage())
    result["machine"]["cpu"]["load"] = load._asdict() if load else None
    say("compiling and starting workers, in processes of their own ...")
    result["techniques"] += techniques.try_isolated(device)
    say("measuring what the plan would prefer ...")
    result["plan"] = trials.measure_plan(device)
    throttling = nvml.read_throttling()  # again, now that the device has worked
    for gpu in result["machine"]["gpus"]:
        causes = inventory.name_throttle_causes(throttling.get(gpu["uuid"], ()))
        gpu["throttled"] += sorted(set(causes) - set(gpu["throttled"]))
    result["problems"] = find_problems(result)
    result["seconds"] = time.perf_counter() - start
    return result
