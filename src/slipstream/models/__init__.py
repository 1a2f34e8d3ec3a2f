"""Networks: plain single-model modules, time-major inside.

Every model maps inputs [T, B, F] and static [B, K] to predictions [B, H, C, Q]:
T context rows, B windows, F inputs, K numbers beside them (static columns, then the rows that are
known ahead), H predicted rows, C targets, Q quantiles.
"""

from slipstream.models.forecaster import (
    OWN_KERNELS,
    MaskedAutoencoder,
    WindowPredictor,
    build,
    has_dropout,
    set_execution,
)
from slipstream.models.noise.rng import Noise

__all__ = [
    "OWN_KERNELS",
    "MaskedAutoencoder",
    "Noise",
    "WindowPredictor",
    "build",
    "has_dropout",
    "set_execution",
]
