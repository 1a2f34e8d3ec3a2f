"""Runs a job's steps under the profiler, finds their bottleneck and tries what would help."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from slipstream import config as configs
from slipstream import machine, runs
from slipstream.autotune.workload import (
    TrainingWorkload,
    prepare_task,
    resolve_batch_size,
)
from slipstream.config import Config, replace_settings
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import monitor, recovery
from slipstream.models import permission
from slipstream.profiling import bottleneck, changes, floor, report, trace
from slipstream.profiling.bottleneck import StepFacts
from slipstream.profiling.changes import Tell
from slipstream.profiling.trace import Trace


class Recording(NamedTuple):
    """What was measured of the unchanged step."""

    facts: StepFacts
    trace: Trace
    chrome: bytes
    """The trace in Chrome's format"""
    sample: dict[str, Any]
    """A sample of the machine"""


def profile(
    config: Config | str | Path | Mapping[str, Any],
    *,
    overrides: tuple[str, ...] = (),
    steps: int = 30,
    out: str | Path | None = None,
    tensorboard: bool = False,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Find where the time of the config's training step goes, and what would make it shorter."""
    config = configs.load(config, overrides)
    permission.allow_classes(config)
    tell("loading the data ...")
    dataset = datasets.load_dataset(config)
    if dataset.memory is None and config.engine.home != "stream":
        config = replace_settings(config, engine={"home": "stream"})
    result, recorded, chrome = examine(config, dataset, steps=steps, tell=tell)
    folder = runs.create_run(config.name, out=str(out or "profiles")).folder
    result |= {"folder": str(folder), "sentences": list(report.write_sentences(result))}
    report.write_files(result, recorded, chrome, folder, tensorboard=tensorboard)
    return result


def examine(
    config: Config, dataset: Dataset, *, steps: int = 30, tell: Tell = lambda _: None
) -> tuple[dict[str, Any], Trace, bytes]:
    """Return the verdict with its evidence, the trace, and the trace in Chrome's format."""
    config = resolve_batch_size(config, dataset)
    tell("timing steps as they are ...")
    workload = TrainingWorkload(config, dataset)
    try:
        recording = _record(workload, dataset, steps, tell)
    finally:
        workload.close()
        recovery.free_memory()
    trials = changes.try_changes(config, dataset, recording.facts, tell)
    facts = replace(recording.facts, gains={change.name: gain for change, gain in trials})
    name, sentence = bottleneck.find_bottleneck(facts)
    bound = facts.floor
    result = {
        "name": config.name,
        "verdict": name,
        "sentence": sentence,
        "ms_per_step": facts.wall_ms,
        "windows_per_s": 1e3 * workload.windows_per_step / facts.wall_ms,
        "parts": report.list_parts(facts),
        "device_idle": facts.idle_share if facts.on_gpu else None,
        "calls_per_step": facts.calls,
        "floor": bound._asdict() | {"ms": bound.ms, "times": facts.wall_ms / bound.ms},
        "changes": changes.recommend(trials, config, facts),
        "tried": [changes.to_dict(change, gain) for change, gain in trials],
        "operations": recording.trace.operations,
        "machine": recording.sample,
        "facts": asdict(facts) | {"floor": bound._asdict()},
        "plan": workload.plan.to_dict(),
    }
    return result, recording.trace, recording.chrome


def _record(workload: TrainingWorkload, dataset: Dataset, steps: int, tell: Tell) -> Recording:
    plan = workload.plan
    machine.warm_up(plan.device)
    count = changes.count_steps(workload)
    usage = MachineUsage()
    wall_ms = min(workload.measure_ms_per_step(count) for _ in range(3))
    faults, others = usage.count_faults() / (3 * count), usage.count_other_cores()
    sample = monitor.sample_machine(plan.device)
    tell(f"{wall_ms:.3g} ms a step; recording {steps} steps ...")
    recorded, chrome = trace.record_trace(workload, min(steps, changes.MAX_STEPS))
    tell("measuring what this machine could do ...")
    task, _ = prepare_task(workload.config, dataset)
    on_gpu = plan.device.type == "cuda"
    facts = StepFacts(
        on_gpu=on_gpu,
        wall_ms=wall_ms,
        floor=floor.compute_floor(task, plan, floor.measure_peaks(plan)),
        faults=faults,
        threads=plan.threads,
        cores=machine.count_available_cores(),
        others=others,
        **bottleneck.compute_shares(recorded, wall_ms=wall_ms, on_gpu=on_gpu),
    )
    return Recording(facts, recorded, chrome, sample)


class MachineUsage:
    """Counts page faults and the work of other processes from its creation on."""

    def __init__(self) -> None:
        self._start = self._read()

    def _read(self) -> tuple[float, float, float, int]:
        own = psutil.Process()
        own_s = sum(sum(p.cpu_times()[:2]) for p in (own, *own.children(recursive=True)))
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)  # macOS and Windows count no iowait
        return time.monotonic(), sum(times) - idle, own_s, _count_major_faults()

    def count_faults(self) -> int:
        """Return the major page faults of this process."""
        return self._read()[3] - self._start[3]

    def count_other_cores(self) -> float:
        """Return the cores that other processes keep busy."""
        (now, busy, own, _), (start, busy_before, own_before, _) = self._read(), self._start
        return max((busy - busy_before) - (own - own_before), 0.0) / (now - start)


def _count_major_faults() -> int:
    """Return how many pages this process has fetched from disk so far."""
    try:
        import resource
    except ImportError:  # Windows does not count them
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
