"""The config: one pydantic model per section. Does not import torch."""

from slipstream.config.base import AUTO, CLASS_LOSSES, OptionText, Scalar
from slipstream.config.data import (
    ALL_ROWS,
    SERIES_COLUMN,
    SIMULATED,
    VALUE_COLUMN,
    WILDCARD,
    Data,
    Signature,
    Split,
    find_matches,
)
from slipstream.config.errors import ConfigError, find_step
from slipstream.config.loading import (
    format_setting,
    from_json_values,
    list_differences,
    list_fixed_settings,
    list_unused,
    load,
    load_demo,
    replace_settings,
    to_json_values,
    to_toml,
)
from slipstream.config.model import Model
from slipstream.config.sections import Config, Predict, PredictFilter
from slipstream.config.train import (
    PRETRAIN_OVERRIDE,
    Augment,
    Engine,
    Pretrain,
    Range,
    Train,
    Tune,
    describe_recurrent,
)

__all__ = [
    "ALL_ROWS",
    "AUTO",
    "CLASS_LOSSES",
    "PRETRAIN_OVERRIDE",
    "SERIES_COLUMN",
    "SIMULATED",
    "VALUE_COLUMN",
    "WILDCARD",
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
    "find_step",
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
