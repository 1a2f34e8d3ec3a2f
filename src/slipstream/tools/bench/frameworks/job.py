"""Runs a whole job in a plain PyTorch loop, or under Lightning.

The network, its first weights, the batches, the loss, the optimizer and the clipping are ours; the
loop around them is theirs, with what their documentation advises. It prints every validation loss.

    python -m slipstream.tools.bench.frameworks.job CONFIG lightning fp16 4 habits
"""

import sys

from slipstream import config as configs
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.engine.lanes import EpochStart, compute_lrs
from slipstream.models import custom
from slipstream.tools.bench.frameworks import lightning_loop, plain_loop
from slipstream.tools.bench.frameworks.workload import PeerSettings, apply_flags, build_loader


def run_job(config: Config, peer: PeerSettings) -> None:
    """Train to the end, with validations, as a user's own script would."""
    dataset = datasets.load_dataset(config)
    batches = build_loader(config, dataset, peer)
    val_batches = build_loader(config, dataset, peer, "val")
    epochs = range(config.train.epochs)
    rates = [
        rate for e in epochs for rate in compute_lrs(config.train, EpochStart(e), len(batches))
    ]
    framework = lightning_loop if peer.framework == "lightning" else plain_loop
    with apply_flags(peer):
        framework.train(config, dataset, peer, rates, batches, val_batches)


if __name__ == "__main__":
    path, framework, precision, workers, habits, *threads = sys.argv[1:7]
    config = configs.load(path)
    custom.allow_classes(config)
    peer = PeerSettings("", framework, precision, int(workers), habits == "habits")
    run_job(config, peer._replace(threads=int(threads[0]) if any(threads) else None))
