"""Counters of the server in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIX = "slipstream_"


@dataclass
class Histogram:
    """Counts by upper bound, with their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def format(self, name: str, labels: str = "") -> Iterator[str]:
        seen = 0
        separated = f"{labels}," if labels else ""
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{separated}le="{bound}"}} {seen}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.total:.6f}"
        yield f"{name}_count{braces} {seen}"


@dataclass
class ServerMetrics:
    """What `GET /metrics` shows."""

    gauges: Mapping[str, tuple[str, Callable[[], float]]]
    """By name: its meaning, and what reads it"""
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status"""
    seconds: dict[str, Histogram] = field(default_factory=dict)
    """By route"""
    batches: Histogram = field(default_factory=lambda: Histogram(WINDOWS))
    """Windows of each call of the model"""
    windows: int = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds.setdefault(route, Histogram(SECONDS)).add(seconds)

    def count_batch(self, num_windows: int) -> None:
        self.batches.add(num_windows)
        self.windows += num_windows

    def format(self) -> str:
        return "\n".join([*self._list_lines(), ""])

    def _list_lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Answered requests.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'{PREFIX}requests_total{{route="{route}",status="{status}"}} {count}'
        yield from _head("request_seconds", "histogram", "From a request's headers to its answer.")
        for route, histogram in sorted(self.seconds.items()):
            yield from histogram.format(f"{PREFIX}request_seconds", f'route="{route}"')
        yield from _head("batch_windows", "histogram", "Windows of each call of the model.")
        if self.batches.counts:
            yield from self.batches.format(f"{PREFIX}batch_windows")
        yield from _head("windows_total", "counter", "Windows that were predicted.")
        yield f"{PREFIX}windows_total {self.windows}"
        for name, (text, read) in self.gauges.items():
            yield from _head(name, "gauge", text)
            yield f"{PREFIX}{name} {read():g}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
