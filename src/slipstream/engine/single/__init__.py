"""A single model: what is trained, its step, and the program with one place."""

from slipstream.engine.single.program import SingleProgram
from slipstream.engine.single.step import SingleStep, build_step
from slipstream.engine.single.task import (
    TrainingTask,
    build_task,
    resolve_settings,
    seed_generators,
)

__all__ = [
    "SingleProgram",
    "SingleStep",
    "TrainingTask",
    "build_step",
    "build_task",
    "resolve_settings",
    "seed_generators",
]
