"""One sample of the monitor, as the log has it."""

from __future__ import annotations

SAMPLE = {
    "event": "monitor",
    "seconds": 1.0,
    "cpu_percent": 104.0,
    "rss_bytes": 1.24e9,
    "gpu_utilisation": 97,
    "gpu_memory_bytes": 2.1e9,
    "power_w": 332.0,
    "temperature_c": 61,
    "clock_mhz": 1800,
    "energy_j": 332.0,
    "throttled": [],
}
