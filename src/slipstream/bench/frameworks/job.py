"""A whole job as others run it: in a plain PyTorch loop, or under Lightning.

The network, its first weights, the batches, the loss, the optimizer and the clipping are ours; the
loop around them is theirs, with what their documentation advises.

    python -m slipstream.bench.frameworks.job CONFIG lightning fp16 4 habits    told epoch by epoch
"""

from __future__ import annotations

import sys

from slipstream import config as configs
from slipstream.bench.frameworks import lightning_loop, plain_loop
from slipstream.bench.frameworks.settings import PeerSettings, apply_flags
from slipstream.bench.frameworks.workload import build_loader
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.engine import optim
from slipstream.models import permission


def run_job(config: Config, way: PeerSettings) -> None:
    """Train to the end, with validations; what a script of somebody's own would do."""
    dataset = datasets.load_dataset(config)
    batches = build_loader(config, dataset, way)
    check = build_loader(config, dataset, way, "val")
    epochs = range(config.train.epochs)
    rates = [rate for e in epochs for rate in optim.compute_lrs(config.train, e, len(batches))]
    train = lightning_loop.train if way.framework == "lightning" else plain_loop.train
    with apply_flags(way):
        train(config, dataset, way, rates, batches, check)


if __name__ == "__main__":
    path, framework, precision, workers, habits = sys.argv[1:6]
    way = PeerSettings("", framework, precision, int(workers), habits == "habits")
    job = configs.load(path)
    permission.allow_classes(job)
    run_job(job, way)
