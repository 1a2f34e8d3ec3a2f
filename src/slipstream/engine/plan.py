"""How a run trains on this machine: chosen before it starts, printed, and written to plan.json."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from slipstream import machine


@dataclass(frozen=True)
class Plan:
    """Every choice about how a run trains, its reasons, and what was measured."""

    device: torch.device
    precision: str
    home: str
    capture: bool
    steps_per_graph: int
    cudnn: tuple[str, ...]
    """By recurrent layer: "persistent", which is PyTorch's own choice, or "standard"; "off" for all
    of them: our own kernels"""
    cudnn_benchmark: bool
    compile: bool
    fused: bool
    set_to_none: bool
    deterministic: bool
    recompute: bool
    threads: int
    onednn: bool
    """CPU: recurrent layers through oneDNN"""
    workers: int
    prefetch: int
    micro_batch: int | None
    """Windows of one forward pass, where the whole batch did not fit"""
    reasons: dict[str, str]
    """Why each choice was made"""
    hardware: dict[str, Any]
    ms_per_step: float | None = None
    """As measured; None if nothing was"""
    kernels: list[str] = field(default_factory=list)
    """Recurrent and attention kernels that ran when it was measured"""
    evidence: list[dict[str, Any]] = field(default_factory=list)
    """Every candidate: what it was, its time, or why it has none"""

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that matrix operands are cast to, if any"""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def flags(self) -> AbstractContextManager[None]:
        """Set torch's global flags as the plan needs them; they are restored at the end."""
        return machine.set_flags(
            threads=self.threads,
            tf32=self.precision == "tf32",
            onednn=self.onednn,
            cudnn_benchmark=self.cudnn_benchmark,
            deterministic=self.deterministic,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"device": str(self.device)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        device, cudnn = torch.device(saved["device"]), tuple(saved["cudnn"])
        return cls(**(saved | {"device": device, "cudnn": cudnn}))
