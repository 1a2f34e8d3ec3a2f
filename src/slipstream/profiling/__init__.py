"""Where a step's time goes, in words first."""

from slipstream.profiling.profiler import examine, profile

__all__ = ["examine", "profile"]
