"""Networks: plain single-model modules, time-major inside.

Every model maps inputs [T, B, F] and static [B, K] to predictions [B, H, C, Q]:
T context rows, B windows, F inputs, K static columns, H predicted rows, C targets, Q quantiles.
"""

from slipstream.models.build import OWN, Forecaster, build, drops, use
from slipstream.models.dropout import Noise
from slipstream.models.masked import Masked

__all__ = ["OWN", "Forecaster", "Masked", "Noise", "build", "drops", "use"]
