"""What a user can ask for. No torch here."""

from slipstream.config.augment import Augment
from slipstream.config.base import CLASS_LOSSES, Scalar
from slipstream.config.data import SIMULATED, Data
from slipstream.config.engine import Engine
from slipstream.config.model import Model
from slipstream.config.pretraining import MASKED, Pretrain
from slipstream.config.reading import changed, demo, differences, load, to_toml
from slipstream.config.sections import Config
from slipstream.config.signature import Signature
from slipstream.config.split import Split
from slipstream.config.train import Train
from slipstream.config.tune import Range, Tune

__all__ = [
    "CLASS_LOSSES",
    "MASKED",
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
