"""The config: one pydantic model per section. Does not import torch."""

from slipstream.config.base import CLASS_LOSSES, OptionText, Scalar
from slipstream.config.data import SIMULATED, Data, Signature, Split, find_matches
from slipstream.config.engine import Engine
from slipstream.config.explanation import ConfigError
from slipstream.config.loading import (
    from_json_values,
    list_differences,
    list_fixed_settings,
    load,
    load_demo,
    replace_settings,
    to_json_values,
    to_toml,
)
from slipstream.config.model import Model
from slipstream.config.pretraining import PRETRAIN_OVERRIDE, Pretrain, describe_recurrent
from slipstream.config.sections import Config, Predict, PredictFilter
from slipstream.config.train import Augment, Train
from slipstream.config.tune import Range, Tune
from slipstream.config.unused import format_setting, list_unused

__all__ = [
    "CLASS_LOSSES",
    "PRETRAIN_OVERRIDE",
    "SIMULATED",
    "Augment",
    "Config",
    "ConfigError",
    "Data",
    "Engine",
    "Model",
    "OptionText",
    "Predict",
    "PredictFilter",
    "Pretrain",
    "Range",
    "Scalar",
    "Signature",
    "Split",
    "Train",
    "Tune",
    "describe_recurrent",
    "find_matches",
    "format_setting",
    "from_json_values",
    "list_differences",
    "list_fixed_settings",
    "list_unused",
    "load",
    "load_demo",
    "replace_settings",
    "to_json_values",
    "to_toml",
]
