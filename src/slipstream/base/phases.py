"""The times of a run's phases. Every moment belongs to one phase, so that the phases add up.

Reading files has no events yet: how far it has come is reported here, for a terminal to show.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

PARTS = {
    "startup_s": ("start-up",),
    "data_s": ("data",),
    "plan_s": ("plan",),
    "kernels_s": ("set-up",),
    "training_s": ("training",),
    "validation_s": ("validation",),
    "scoring_s": ("scoring", "baselines"),
    "report_s": ("report",),
}
"""The parts of a run's time, and their phases"""
SEARCH_PARTS = {
    "startup_s": ("start-up",),
    "data_s": ("data",),
    "searching_s": ("searching",),
    "retraining_s": ("retraining",),
    "scoring_s": ("scoring",),
    "report_s": ("report",),
}
"""The parts of a search's time, and their phases"""
EARLIER = "earlier starts"
"""The phase for the time before a resume that belongs to no other phase"""
NO_SECONDS: Mapping[str, float] = MappingProxyType({})
ShowProgress = Callable[[str, float | None], None]
"""A function that takes a description of the current work, empty at its end, and the share that is
done, None if unknown"""
_show_progress: ContextVar[ShowProgress | None] = ContextVar("show_progress", default=None)
_process_start: float | None = None
"""The start of a process that waited for its command; None for others"""


class PhaseTimer:
    """Times the phases of a run.

    `seconds` has the time between the begin and the end of each phase. In the parts of `summarize`,
    the time between two phases counts for the later one.
    """

    def __init__(self, started_at: float | None = None) -> None:
        self.started_at = time.perf_counter() if started_at is None else started_at
        """The start, by `time.perf_counter`"""
        self.seconds: dict[str, float] = {}
        self._gapless: dict[str, float] = {}
        self._since = self.started_at

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the time of a block for a phase."""
        began = time.perf_counter()
        yield
        _add(self.seconds, phase, time.perf_counter() - began)
        self.end(phase)

    def end(self, phase: str) -> None:
        """End a phase that began where the last one ended."""
        now = time.perf_counter()
        _add(self._gapless, phase, now - self._since)
        self._since = now

    def move(self, seconds: Mapping[str, float], *, source: str) -> None:
        """Move seconds from one phase to others."""
        for phase, spent_s in seconds.items():
            _add(self._gapless, phase, spent_s)
            _add(self._gapless, source, -spent_s)

    def summarize(
        self,
        parts: Mapping[str, tuple[str, ...]] = PARTS,
        *,
        before: Mapping[str, float] = NO_SECONDS,
    ) -> dict[str, float]:
        """Return the parts and their sum, `wall_s`, up to now; what comes after the last phase is
        the report's.

        `before` are the phases before a resume: `earlier_s` is what none of the parts has of them,
        and `process_s` is the time since the resume.
        """
        spent = dict(self._gapless)
        process_s = time.perf_counter() - self.started_at
        _add(spent, "report", process_s - sum(spent.values()))
        for phase, spent_s in before.items():
            _add(spent, phase, spent_s)
        result = {name: sum(spent.get(part, 0.0) for part in parts[name]) for name in parts}
        if before:
            result |= {"earlier_s": spent.get(EARLIER, 0.0), "process_s": process_s}
        return result | {"wall_s": sum(spent.values())}

    def extend(self, parts: Mapping[str, float], part: str) -> dict[str, float]:
        """Return the parts of `summarize` with the time since then added to another part."""
        since_s = time.perf_counter() - self.started_at - parts.get("process_s", parts["wall_s"])
        sums = [part, *(name for name in ("process_s", "wall_s") if name in parts)]
        return dict(parts) | {name: parts.get(name, 0.0) + since_s for name in sums}


def _add(seconds: dict[str, float], phase: str, spent_s: float) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + spent_s


def set_process_start(moment: float) -> None:
    """Set the start of this process's time, by `time.perf_counter`, for a process that waited for
    its command until then."""
    global _process_start
    _process_start = moment


def find_process_start() -> float:
    """Return when this process started, by `time.perf_counter`."""
    if _process_start is not None:
        return _process_start
    if sys.platform == "linux" and (stat := Path("/proc/self/stat")).exists():
        # psutil adds the time of the last boot, which is known to a second only
        ticks = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    else:
        import psutil

        age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter() - age_s


def report_progress(text: str, share: float | None = None) -> None:
    """Report the current work and the share of it that is done to the listeners; "" ends it."""
    if (show := _show_progress.get()) is not None:
        show(text, share)


@contextmanager
def listen_to_progress(show: ShowProgress) -> Iterator[None]:
    """Call a function for every report within the block."""
    token = _show_progress.set(show)
    try:
        yield
    finally:
        _show_progress.reset(token)
