"""The resources of a cluster's nodes, and the bundle of resources for each worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from slipstream import config as configs
from slipstream.base import machine
from slipstream.base.errors import Option, UserError
from slipstream.base.text import format_count
from slipstream.config import Config

WorkerCount = int | Literal["auto"]


def check_count(requested: WorkerCount) -> None:
    """Raise a UserError unless a number of workers is 1 or more."""
    if requested != "auto" and requested < 1:
        raise UserError(Option("workers") + f" is {requested}; give a number from 1, or auto")


def count_workers(requested: WorkerCount, config: Config) -> int:
    """Return the requested number; "auto" is one worker per GPU."""
    if requested != "auto":
        return requested
    device = machine.choose_device(config.engine.device)
    names_gpu = config.engine.device.startswith("cuda:")
    return 1 if device.type == "cpu" or names_gpu else max(torch.cuda.device_count(), 1)


def check_config(config: Config, data: Any) -> None:
    """Raise a UserError for settings that several workers do not support."""
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


MAX_LISTED = 4
"""Nodes in a message"""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    name: str
    cpus: int
    gpus: int = 0

    def count_places(self, bundle: Bundle) -> int:
        """Return how many bundles fit into this node."""
        places = [
            have // need
            for have, need in ((self.cpus, bundle.cpus), (self.gpus, bundle.gpus))
            if need
        ]
        return min(places, default=0)


@dataclass(frozen=True)
class Bundle:
    """The resources of one worker: CPUs, and one GPU where the cluster has any."""

    cpus: int
    gpus: int = 0

    def describe(self) -> str:
        parts = [format_count(self.gpus, "GPU")] if self.gpus else []
        parts += [format_count(self.cpus, "CPU")] if self.cpus else []
        return " and ".join(parts)

    def limit_threads(self, config: Config) -> Config:
        """Set the threads of a worker on a CPU to its CPUs; it sees all cores of its node."""
        if self.gpus or config.engine.threads != "auto":
            return config
        return configs.replace_settings(config, {"engine.threads": self.cpus})


def needs_gpus(nodes: Sequence[Node], device: str) -> bool:
    """Return whether each worker gets a GPU: if there are any, unless `engine.device` says
    otherwise."""
    num_gpus = sum(node.gpus for node in nodes)
    if device == "cuda" and not num_gpus:
        raise UserError(
            f'engine.device = "cuda", but the Ray cluster has no GPU ({describe_nodes(nodes)}); '
            'add a node with one, or set engine.device = "cpu"'
        )
    return num_gpus > 0 and device in ("auto", "cuda")


def count_ray_workers(requested: WorkerCount, nodes: Sequence[Node], device: str) -> int:
    """Return the requested number; "auto" is one worker per GPU, or per node without GPUs."""
    if requested != "auto":
        return requested
    if needs_gpus(nodes, device):
        return sum(node.gpus for node in nodes)
    return max(sum(node.cpus > 0 for node in nodes), 1)


def choose_bundle(num_workers: int, nodes: Sequence[Node], device: str) -> Bundle:
    """Return the largest equal bundle for every worker; raise a UserError where they do not fit."""
    gpus = int(needs_gpus(nodes, device))
    for cpus in range(max((node.cpus for node in nodes), default=0), -gpus, -1):
        bundle = Bundle(cpus, gpus)
        if count_places(nodes, bundle) >= num_workers:
            return bundle
    kind = "GPU" if gpus else "CPU"
    most = sum(node.gpus if gpus else node.cpus for node in nodes)
    raise UserError(
        Option("workers", num_workers) + f": each worker needs one {kind}, but the Ray cluster has "
        f"{format_count(most, kind)} ({describe_nodes(nodes)}), so {num_workers - most} "
        f"{('is' if num_workers - most == 1 else 'are')} missing; start at most "
        f"{format_count(most, 'worker')}, or add nodes"
    )


def count_places(nodes: Sequence[Node], bundle: Bundle) -> int:
    """Return how many bundles the cluster has room for when it is idle."""
    return sum(node.count_places(bundle) for node in nodes)


def describe_nodes(nodes: Sequence[Node]) -> str:
    """List the nodes with their resources."""
    parts = [
        f"{node.name}: {Bundle(node.cpus, node.gpus).describe() or 'nothing'}"
        for node in nodes[:MAX_LISTED]
    ]
    further = nodes[MAX_LISTED:]
    return "; ".join(parts) + (
        f"; and {format_count(len(further), 'more node')}" if further else ""
    )
