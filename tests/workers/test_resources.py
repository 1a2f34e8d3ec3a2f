"""What each worker gets of a cluster, and which requests are refused."""

from __future__ import annotations

import pytest

from slipstream.base.errors import UserError
from slipstream.workers.resources import (
    Bundle,
    Node,
    choose_bundle,
    count_places,
    count_ray_workers,
    describe_nodes,
)
from tests.conftest import small_config

GPU_NODES = [Node("a", cpus=16, gpus=2), Node("b", cpus=8, gpus=1), Node("c", cpus=4)]
CPU_NODES = [Node("a", cpus=8), Node("b", cpus=4)]


def test_auto_is_a_worker_per_gpu_or_per_node_without_gpus():
    assert count_ray_workers("auto", GPU_NODES, "auto") == 3
    assert count_ray_workers("auto", GPU_NODES, "cpu") == 3  # three nodes
    assert count_ray_workers("auto", CPU_NODES, "auto") == 2
    assert count_ray_workers("auto", [Node("head", cpus=0), *CPU_NODES], "auto") == 2
    assert count_ray_workers(5, CPU_NODES, "auto") == 5


@pytest.mark.parametrize(
    ("num_workers", "nodes", "device", "expected"),
    [
        (3, GPU_NODES, "auto", Bundle(8, 1)),
        (1, GPU_NODES, "cuda", Bundle(16, 1)),
        (2, GPU_NODES, "cpu", Bundle(8)),
        (2, CPU_NODES, "auto", Bundle(4)),
        (3, CPU_NODES, "auto", Bundle(4)),
        (12, CPU_NODES, "auto", Bundle(1)),
        (1, [Node("a", cpus=0, gpus=1)], "auto", Bundle(0, 1)),
    ],
)
def test_workers_share_the_cluster_equally(num_workers, nodes, device, expected):
    bundle = choose_bundle(num_workers, nodes, device)
    assert bundle == expected
    assert count_places(nodes, bundle) >= num_workers


def test_what_never_fits_is_refused_with_what_is_there_and_what_is_missing():
    with pytest.raises(UserError, match=r"--workers 4: .* one GPU, .* has 3 GPUs .* 1 is missing"):
        choose_bundle(4, GPU_NODES, "auto")
    with pytest.raises(UserError) as refusal:
        choose_bundle(15, CPU_NODES, "auto")
    assert "has 12 CPUs (a: 8 CPUs; b: 4 CPUs), so 3 are missing" in str(refusal.value)
    assert "start at most 12 workers, or add nodes" in str(refusal.value)
    with pytest.raises(UserError, match=r'engine.device = "cuda", but .* no GPU \(a: 8 CPUs'):
        choose_bundle(1, CPU_NODES, "cuda")


def test_a_large_cluster_is_described_in_short():
    nodes = [Node(f"n{i}", cpus=8, gpus=1) for i in range(6)]
    assert describe_nodes(nodes).endswith("n3: 1 GPU and 8 CPUs; and 2 more nodes")


def test_a_worker_on_a_cpu_has_as_many_threads_as_cpus(tmp_path):
    config = small_config(tmp_path, engine={"device": "cpu", "threads": "auto"})
    assert Bundle(3).limit_threads(config).engine.threads == 3
    assert Bundle(3, 1).limit_threads(config).engine.threads == "auto"
    chosen = small_config(tmp_path, engine={"device": "cpu", "threads": 2})
    assert Bundle(3).limit_threads(chosen).engine.threads == 2
