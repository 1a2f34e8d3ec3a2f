"""What a user can ask for. No torch here."""

from slipstream.config.reading import demo, differences, load, to_toml
from slipstream.config.sections import (
    SIMULATED,
    Config,
    Data,
    Engine,
    Model,
    Scalar,
    Split,
    Train,
)
from slipstream.config.signature import Signature

__all__ = [
    "SIMULATED",
    "Config",
    "Data",
    "Engine",
    "Model",
    "Scalar",
    "Signature",
    "Split",
    "Train",
    "demo",
    "differences",
    "load",
    "to_toml",
]
