"""Networks with random weights as runs, and what they predict in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import config as configs
from slipstream.config import Config, Signature
from slipstream.data.scaler import Scaler, order_columns
from slipstream.data.windows import build_series, merge_channels
from slipstream.engine.planning import make_plan
from slipstream.inference.portable import PortableMember, PortableModel, PortableRun
from slipstream.inference.rows import PhysicalWindows
from slipstream.models.forecaster import build
from slipstream.runs import Run
from slipstream.scoring.ensemble import average_predictors
from slipstream.scoring.predict import make_predictor

NAMES = "abcdefgh"


def make_signature(**fields: Any) -> Signature:
    """Three inputs, of which the last one is the target; fields override."""
    base: dict[str, Any] = {
        "inputs": ("a", "b", "c"),
        "targets": ("c",),
        "static": (),
        "shared": 1,
        "context": 8,
        "horizon": 2,
        "channels": "together",
        "quantiles": (),
        "step": 1.0,
    }
    return Signature(**(base | fields))


def make_nearly_constant(windows: PhysicalWindows, spread: float) -> PhysicalWindows:
    """Return windows whose rows differ from their first by this share of its size."""
    return windows._replace(rows=windows.rows[:, :1] + spread * windows.rows)


def make_scaler(signature: Signature, *, offset: float = 3.0, seed: int = 0) -> Scaler:
    """Columns of random places and sizes; class numbers are not scaled."""
    draw = np.random.default_rng(seed)
    scaler = Scaler("standard", {}, {}, {}, {}, {})
    for name in (*order_columns(signature), *signature.static):
        shift, size = offset * draw.uniform(-1, 1), draw.uniform(0.5, 3)
        if signature.classes and name in signature.targets:
            shift, size = 0.0, 1.0
        scaler.shift[name], scaler.size[name], scaler.deviation[name] = shift, size, size
        scaler.low[name], scaler.high[name] = shift - 3 * size, shift + 3 * size
    return scaler


class RandomRun:
    """A run of untrained networks: the same weights in PyTorch and as arrays."""

    def __init__(
        self,
        model: dict[str, Any],
        signature: Signature,
        *,
        count: int = 1,
        offset: float = 3.0,
        levels: Sequence[str] = (),
        sections: Mapping[str, Any] | None = None,
    ) -> None:
        self.config: Config = configs.load(
            {"model": model, "engine": {"device": "cpu", "threads": 1}, **(sections or {})}
        )
        limits = self.config.model.output_range
        self.signature = signature.model_copy(update={"output_range": limits})
        self.scaler = make_scaler(self.signature, offset=offset)
        self.networks = []
        for seed in range(count):
            torch.manual_seed(seed)
            self.networks.append(build(self.config.model, self.signature).eval())
        models = tuple(
            PortableModel(
                self.config,
                self.signature,
                self.scaler,
                {name: weight.numpy() for name, weight in network.state_dict().items()},
            )
            for network in self.networks
        )
        shape = (self.signature.steps_out, len(self.signature.targets))
        widths = {
            level: np.full(shape, 0.1 * (1 + place)) for place, level in enumerate(levels)
        } or None
        folder = Run(Path("random"))
        member = PortableMember("random", folder, models, "the model", widths)
        self.portable = PortableRun(
            folder, "", (member,), (1.0,), widths, 0, "the model", hashes={}
        )

    def draw_windows(self, batch: int, length: int, seed: int = 0) -> PhysicalWindows:
        """Windows whose values are what training might have seen."""
        draw, scaler, signature = np.random.default_rng(seed), self.scaler, self.signature

        def sample(columns: Sequence[str], *shape: int) -> Any:
            size, shift = (np.array([by[n] for n in columns]) for by in (scaler.size, scaler.shift))
            return draw.standard_normal((*shape, len(columns))) * size + shift

        rows, columns = signature.future_shape
        return PhysicalWindows(
            sample(signature.inputs, batch, length),
            sample(signature.static, batch) if signature.static else None,
            sample(signature.future, batch, rows) if columns else None,
        )

    def predict(self, windows: PhysicalWindows, *, exact: bool = False) -> dict[str, Any]:
        """What the networks predict in PyTorch, in physical units, as `predict` computes it, or
        what they would predict for the same scaled float32 rows if nothing else were rounded."""
        signature, scaler = self.signature, self.scaler
        batch, length, _ = windows.rows.shape
        columns = order_columns(signature)
        rows_each = length + signature.steps_out
        values = np.zeros((batch, rows_each, len(columns)), dtype=np.float32)
        for place, name in enumerate(signature.inputs):
            values[:, :length, place] = self._scale(windows.rows[..., place], name)
        lead = length if signature.horizon else length - 1
        if windows.future is not None:
            for place, name in enumerate(signature.future):
                ahead = self._scale(windows.future[..., place], name)
                values[:, lead : lead + signature.horizon, place] = ahead
        static = None
        if windows.static is not None:
            static = np.stack(
                [self._scale(windows.static[:, i], n) for i, n in enumerate(signature.static)], 1
            )
        series = build_series(
            values.reshape(-1, len(columns)),
            static,
            None,
            np.arange(batch + 1) * rows_each,
            signature,
        )
        series = replace(
            series,
            context_rows=torch.arange(length)[:, None],
            target_rows=lead + torch.arange(signature.steps_out),
        )
        plan = make_plan(self.config, data_bytes=0, training=False)
        networks = self.networks
        if exact:
            series = replace(
                series,
                values=series.values.double(),
                static=None if series.static is None else series.static.double(),
            )
            networks = [copy.deepcopy(one).double() for one in networks]
        predictors = [make_predictor(n, plan, signature, scaler) for n in networks]
        with torch.inference_mode(), plan.flags():
            raw = average_predictors(predictors, signature)(series, series.offsets[:-1])
        return self._restore(merge_channels(raw, signature.sequences_per_window))

    def _scale(self, values: Any, name: str) -> Any:
        return ((values - self.scaler.shift[name]) / self.scaler.size[name]).astype(np.float32)

    def _restore(self, scaled: torch.Tensor) -> dict[str, Any]:
        signature, scaler = self.signature, self.scaler
        if signature.classes:
            return {"probability": torch.softmax(scaled[:, :, 0], dim=-1).numpy()}
        size, shift = (
            np.array([[by[n]] for n in signature.targets]) for by in (scaler.size, scaler.shift)
        )
        limits = signature.output_range or (-np.inf, np.inf)
        physical = scaled.double().numpy() * size + shift
        limited = physical.clip(*limits)
        if signature.quantiles:
            outputs = {"prediction": limited}
            levels = np.array(signature.quantiles)
            point = np.apply_along_axis(lambda some: np.interp(0.5, levels, some), -1, physical)
        else:
            outputs, point = {"prediction": limited[..., 0]}, physical[..., 0]
        for width in (self.portable.half_widths or {}).values():
            outputs.setdefault("lower", []).append((point - width).clip(*limits))
            outputs.setdefault("upper", []).append((point + width).clip(*limits))
        return {
            name: np.stack(values, axis=-1) if isinstance(values, list) else values
            for name, values in outputs.items()
        }
