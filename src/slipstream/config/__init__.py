"""What a user can ask for. No torch here."""

from slipstream.config.augment import Augment
from slipstream.config.base import CLASS_LOSSES, Scalar
from slipstream.config.pretraining import Pretrain
from slipstream.config.reading import changed, demo, differences, load, to_toml
from slipstream.config.sections import (
    SIMULATED,
    Config,
    Data,
    Engine,
    Model,
    Train,
)
from slipstream.config.signature import Signature
from slipstream.config.split import Split
from slipstream.config.tune import Range, Tune

__all__ = [
    "CLASS_LOSSES",
    "SIMULATED",
    "Augment",
    "Config",
    "Data",
    "Engine",
    "Model",
    "Pretrain",
    "Range",
    "Scalar",
    "Signature",
    "Split",
    "Train",
    "Tune",
    "changed",
    "demo",
    "differences",
    "load",
    "to_toml",
]
