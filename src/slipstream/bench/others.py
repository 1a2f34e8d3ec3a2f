"""A whole job as others run it: in a plain PyTorch loop, or under Lightning.

The network, its first weights, the batches, the loss, the optimizer and the clipping are ours; the
loop around them is theirs, with what their documentation advises.

    python -m slipstream.bench.others CONFIG lightning fp16 4 habits    told epoch by epoch
"""

from __future__ import annotations

import sys

from slipstream import config as configs
from slipstream.bench import in_lightning, plain
from slipstream.bench.ways import Way, settings_of
from slipstream.bench.work import loader
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.engine import optim
from slipstream.models import consent


def whole_job(config: Config, way: Way) -> None:
    """Train to the end, with validations; what a script of somebody's own would do."""
    dataset = datasets.load(config)
    batches = loader(config, dataset, way)
    check = loader(config, dataset, way, "val")
    epochs = range(config.train.epochs)
    rates = [rate for e in epochs for rate in optim.rates(config.train, e, len(batches))]
    train = in_lightning.train if way.framework == "lightning" else plain.train
    with settings_of(way):
        train(config, dataset, way, rates, batches, check)


if __name__ == "__main__":
    path, framework, precision, workers, habits = sys.argv[1:6]
    way = Way("", framework, precision, int(workers), habits == "habits")
    job = configs.load(path)
    consent.allow(job)
    whole_job(job, way)
