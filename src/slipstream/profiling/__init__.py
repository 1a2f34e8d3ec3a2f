"""Finds where a step's time goes, and says so in words first."""

from slipstream.profiling.profiler import examine, profile

__all__ = ["examine", "profile"]
