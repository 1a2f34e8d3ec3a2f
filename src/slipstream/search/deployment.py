"""What candidates cost where they run: microseconds per prediction here, flash and RAM in C.

All of it depends on shapes only, so that a candidate whose weights were not kept is measured with
new ones. It is bounded: the best candidates, the members and the baselines, as long as there is
time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from slipstream.base.errors import UserError
from slipstream.config import Config
from slipstream.data.predictions import LEVELS
from slipstream.engine.planning import make_plan
from slipstream.exporting.c.source import CSettings, CSizes, compute_sizes
from slipstream.exporting.formats import FORMATS, keeps_digits
from slipstream.inference.portable import PortableModel
from slipstream.models.forecaster import build
from slipstream.runs.summary import DeploymentCosts
from slipstream.scoring.batch import Predictor
from slipstream.scoring.ensemble import build_predictor
from slipstream.search.packs import TrialData

NUM_TIMED, MAX_TIMED_S = 25, 0.05
"""Predictions of one window that are timed, and for how long at most"""


NOT_MEASURED: DeploymentCosts = {
    "parameters": None,
    "predict_us": None,
    "flash_bytes": None,
    "ram_bytes": None,
}


def measure_network(
    config: Config, data: TrialData, weights: Mapping[str, Tensor] | None = None
) -> DeploymentCosts:
    """Return the costs of a network; without its weights, with new ones of the same shapes."""
    signature = data.dataset.signature
    if not weights:
        with torch.random.fork_rng([]):
            weights = build(config.model, signature).state_dict()
    plan = make_plan(config, data_bytes=0, training=False)
    with plan.flags():
        predict_us = time_predictor(build_predictor(weights, config, data.dataset, plan), data)
    sizes = measure_c(config, data, weights)
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "predict_us": predict_us,
        "flash_bytes": None if sizes is None else sizes.flash_bytes,
        "ram_bytes": None if sizes is None else sizes.scratch_bytes + sizes.state_bytes,
    }


def time_predictor(predict: Predictor, data: TrialData) -> float:
    """Return the median of the microseconds that one window takes, after a first one."""
    device = data.series.values.device
    starts = data.folds[-1]["val"][:1].to(device)
    times: list[float] = []
    began = time.perf_counter()
    while not times or (len(times) <= NUM_TIMED and time.perf_counter() - began < MAX_TIMED_S):
        started = time.perf_counter()
        predict(data.series, starts)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[1:] or times)


def measure_c(config: Config, data: TrialData, weights: Mapping[str, Tensor]) -> CSizes | None:
    """Return the sizes that `slipstream export --to c` states; None where there is no such code."""
    dataset, signature = data.dataset, data.dataset.signature
    if dataset.scaler.series or not FORMATS["c"].holds(config.model):
        return None
    arrays = {name: tensor.float().cpu().numpy() for name, tensor in weights.items()}
    model = PortableModel(config, signature, dataset.scaler, arrays, dataset.limits)
    settings = CSettings(double=not keeps_digits(model), carried=signature.state == "carried")
    widths = {}
    if not (signature.classes or signature.quantiles):
        shape = signature.steps_out, len(signature.targets)
        widths = {level: np.zeros(shape) for level in LEVELS}
    with suppress(UserError):  # a step of data.prepare that C does not have
        return compute_sizes(model, settings, widths)
    return None
