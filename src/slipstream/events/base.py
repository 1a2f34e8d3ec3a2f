"""What all events have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have."""

    at_s: float | None = None
    """Seconds since the run was opened; None for events that are not logged"""
