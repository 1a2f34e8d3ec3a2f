"""How a run will go on this machine: chosen before it starts, printed, and kept with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream import hardware
from slipstream.config import Engine
from slipstream.errors import UserError

AMPERE = (8, 0)


@dataclass(frozen=True)
class Plan:
    device: torch.device
    precision: str
    home: str
    capture: bool
    threads: int
    reasons: dict[str, str]
    """Why each choice was made."""
    hardware: dict[str, Any]

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that matrix operands are cast to, if any."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "precision": self.precision,
            "home": self.home,
            "capture": self.capture,
            "threads": self.threads,
            "reasons": self.reasons,
            "hardware": self.hardware,
        }


def make(engine: Engine, *, data_bytes: int, training: bool = True) -> Plan:
    device = hardware.choose_device(engine.device)
    found = hardware.describe(device)
    precision, why_precision = _precision(engine, device)
    capture, why_capture = False, "only training steps are captured"
    if training:
        capture, why_capture = _capture(engine, device)
    threads = hardware.available_cores() if engine.threads == "auto" else engine.threads
    where = found.get("gpu", found["cpu"])
    room = found.get("gpu_memory_bytes", found["memory_bytes"])
    return Plan(
        device=device,
        precision=precision,
        home="device",
        capture=capture,
        threads=threads,
        reasons={
            "device": f"{where}" + (" (asked for)" if engine.device != "auto" else ""),
            "precision": why_precision,
            "home": f"{data_bytes / 1e6:.1f} MB of series beside {room / 1e9:.0f} GB of memory",
            "capture": why_capture,
            "threads": "every core this process may use"
            if engine.threads == "auto"
            else "asked for",
        },
        hardware=found,
    )


def _precision(engine: Engine, device: torch.device) -> tuple[str, str]:
    asked = engine.precision
    if device.type == "cpu":
        if asked in ("tf32", "fp16"):
            raise UserError(
                f'engine.precision is "{asked}", which a CPU does not have; use "fp32" or "bf16"'
            )
        return ("fp32", "the CPU's own") if asked == "auto" else (asked, "asked for")
    has_tf32 = torch.cuda.get_device_capability(device) >= AMPERE
    if asked == "tf32" and not has_tf32:
        raise UserError('engine.precision is "tf32", which this GPU lacks; use "fp32" or "fp16"')
    if asked == "auto":
        return ("tf32", "this GPU has it") if has_tf32 else ("fp32", "this GPU has no tf32")
    return asked, "asked for"


def _capture(engine: Engine, device: torch.device) -> tuple[bool, str]:
    if device.type == "cpu":
        if engine.capture is True:
            raise UserError("engine.capture is true, but steps are captured on CUDA only")
        return False, "a CPU runs the step as it is"
    if engine.capture == "auto":
        return True, "the whole step replays as one CUDA graph"
    return engine.capture, "asked for"
