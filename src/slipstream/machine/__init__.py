"""What this machine offers: devices, cores, memory, the NVIDIA driver, and torch's global flags."""

from slipstream.machine.devices import (
    choose_device,
    describe,
    find_gpu_hint,
    get_max_clock_mhz,
    has_fast_bf16,
    has_tf32,
    set_flags,
    synchronize,
    warm_up,
)
from slipstream.machine.limits import (
    Cgroup,
    count_available_cores,
    count_visible_cores,
    get_available_memory,
    get_total_memory,
    read_cpu_quotas,
    read_memory_limits,
)
from slipstream.machine.load import CpuLoad, CpuUsage, compute_load, read_cpu_usage
from slipstream.machine.processes import describe_exit, kill_process_group, signal_process_group

__all__ = [
    "Cgroup",
    "CpuLoad",
    "CpuUsage",
    "choose_device",
    "compute_load",
    "count_available_cores",
    "count_visible_cores",
    "describe",
    "describe_exit",
    "find_gpu_hint",
    "get_available_memory",
    "get_max_clock_mhz",
    "get_total_memory",
    "has_fast_bf16",
    "has_tf32",
    "kill_process_group",
    "read_cpu_quotas",
    "read_cpu_usage",
    "read_memory_limits",
    "set_flags",
    "signal_process_group",
    "synchronize",
    "warm_up",
]
