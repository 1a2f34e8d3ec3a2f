"""What Linux reports about the processor; other systems report less."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import NamedTuple


class CpuInfo(NamedTuple):
    name: str
    flags: frozenset[str]
    """Instruction sets as /proc/cpuinfo names them; empty on macOS and Windows, which lack it"""


@functools.cache
def read_cpu_info() -> CpuInfo:
    """Read the processor's name and instruction sets."""
    fields: dict[str, str] = {}
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags") or fields.get("Features") or ""  # x86, Arm
    return CpuInfo(name, frozenset(flags.split()))


def read_text(path: Path) -> str:
    """Return the content of a small file, or an empty string where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
