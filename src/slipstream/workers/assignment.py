"""How many workers there are, and the GPU or the cores of each."""

import os
from typing import Any, Literal

import torch

from slipstream import config as configs
from slipstream import machine
from slipstream.config import Config
from slipstream.errors import UserError

WorkerCount = int | Literal["auto"]


def check_count(requested: WorkerCount) -> None:
    """Raise a UserError for a number that is not one from 1."""
    if requested != "auto" and requested < 1:
        raise UserError(f"--workers is {requested}; give a number from 1, or auto")


def count_workers(requested: WorkerCount, config: Config) -> int:
    """Return the requested number; "auto" is one worker per GPU."""
    if requested != "auto":
        return requested
    device = machine.choose_device(config.engine.device)
    names_gpu = config.engine.device.startswith("cuda:")
    return 1 if device.type == "cpu" or names_gpu else max(torch.cuda.device_count(), 1)


def check_config(config: Config, data: Any) -> None:
    """Raise a UserError for what several workers do not support."""
    if data is not None or not config.data.paths:
        raise UserError(
            "several workers read the data themselves; set data.path instead of passing a table, "
            "or use one worker"
        )
    if config.engine.device.startswith("cuda:"):
        raise UserError(
            f'engine.device = "{config.engine.device}" names one GPU; for several workers set '
            '"cuda", or use one worker'
        )


def assign_gpus(config: Config, num_workers: int) -> list[dict[str, str]]:
    """Return the environment of each worker, which shows it one GPU."""
    if machine.choose_device(config.engine.device).type == "cpu":
        return [{}] * num_workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(num_workers)]


def split_cores(config: Config, num_workers: int) -> Config:
    """On a CPU, divide the cores among the workers."""
    on_cpu = machine.choose_device(config.engine.device).type == "cpu"
    if not on_cpu or config.engine.threads != "auto":
        return config
    threads = max(machine.count_available_cores() // num_workers, 1)
    return configs.replace_settings(config, {"engine.threads": threads})
