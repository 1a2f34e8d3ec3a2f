"""What a user can ask for. No torch here."""

from slipstream.config.augment import Augment
from slipstream.config.base import Scalar
from slipstream.config.pretraining import Pretrain
from slipstream.config.reading import demo, differences, load, to_toml
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

__all__ = [
    "SIMULATED",
    "Augment",
    "Config",
    "Data",
    "Engine",
    "Model",
    "Pretrain",
    "Scalar",
    "Signature",
    "Split",
    "Train",
    "demo",
    "differences",
    "load",
    "to_toml",
]
