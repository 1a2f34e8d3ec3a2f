"""What the nodes of a cluster have, and what each worker gets of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream import config as configs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.text import format_count
from slipstream.workers.assignment import WorkerCount

MAX_LISTED = 4
"""Nodes in a message"""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    name: str
    cpus: int
    gpus: int = 0

    def count_places(self, bundle: "Bundle") -> int:
        """Return how many bundles fit into this node."""
        places = [
            have // need
            for have, need in ((self.cpus, bundle.cpus), (self.gpus, bundle.gpus))
            if need
        ]
        return min(places, default=0)


@dataclass(frozen=True)
class Bundle:
    """What one worker gets: CPUs, and one GPU where the cluster has any."""

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
    """Whether each worker gets a GPU: if there are any, unless `engine.device` says otherwise."""
    num_gpus = sum(node.gpus for node in nodes)
    if device == "cuda" and not num_gpus:
        raise UserError(
            f'engine.device = "cuda", but the Ray cluster has no GPU ({describe_nodes(nodes)}); '
            'add a node with one, or set engine.device = "cpu"'
        )
    return num_gpus > 0 and device in ("auto", "cuda")


def count_workers(requested: WorkerCount, nodes: Sequence[Node], device: str) -> int:
    """Return the requested number; "auto" is one worker per GPU, or per node without GPUs."""
    if requested != "auto":
        return requested
    if needs_gpus(nodes, device):
        return sum(node.gpus for node in nodes)
    return max(sum(node.cpus > 0 for node in nodes), 1)


def choose_bundle(num_workers: int, nodes: Sequence[Node], device: str) -> Bundle:
    """Return the largest equal share for every worker; raise a UserError where they do not fit."""
    gpus = int(needs_gpus(nodes, device))
    for cpus in range(max((node.cpus for node in nodes), default=0), -gpus, -1):
        bundle = Bundle(cpus, gpus)
        if count_places(nodes, bundle) >= num_workers:
            return bundle
    kind = "GPU" if gpus else "CPU"
    most = sum(node.gpus if gpus else node.cpus for node in nodes)
    raise UserError(
        f"--workers {num_workers}: each worker needs one {kind}, but the Ray cluster has "
        f"{format_count(most, kind)} ({describe_nodes(nodes)}), so {num_workers - most} "
        f"{'is' if num_workers - most == 1 else 'are'} missing; start at most "
        f"{format_count(most, 'worker')}, or add nodes"
    )


def count_places(nodes: Sequence[Node], bundle: Bundle) -> int:
    """Return how many bundles the cluster has room for when it is idle."""
    return sum(node.count_places(bundle) for node in nodes)


def describe_nodes(nodes: Sequence[Node]) -> str:
    """List the nodes with what they have."""
    parts = [
        f"{node.name}: {Bundle(node.cpus, node.gpus).describe() or 'nothing'}"
        for node in nodes[:MAX_LISTED]
    ]
    rest = nodes[MAX_LISTED:]
    return "; ".join(parts) + (f"; and {format_count(len(rest), 'more node')}" if rest else "")
