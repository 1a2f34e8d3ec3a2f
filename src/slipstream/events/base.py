"""The base class of all events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base class of all events."""

    at_s: float | None = None
    """Seconds since the run was opened; None for events that are not logged"""
