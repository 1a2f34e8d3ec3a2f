"""One sample of the monitor."""

from __future__ import annotations

from slipstream.events import MachineSample

ON_CPU = MachineSample(seconds=1.0, cpu_percent=104.0, rss_bytes=1_240_000_000)
SAMPLE = MachineSample(
    seconds=1.0,
    cpu_percent=104.0,
    rss_bytes=1_240_000_000,
    gpu_utilisation=97,
    gpu_memory_bytes=2_100_000_000,
    power_w=332.0,
    temperature_c=61,
    clock_mhz=1800,
    energy_j=332.0,
    throttled=[],
)
