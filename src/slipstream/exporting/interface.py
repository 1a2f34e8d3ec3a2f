"""What goes into an exported model, and what comes out of it: columns, shapes, types and names.

Everything is in physical units. Shapes: B windows, T rows, H predicted rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.base.text import format_count
from slipstream.config import Model, Signature
from slipstream.config.prepare import name_step
from slipstream.data.scaler import Scaler
from slipstream.inference.portable import PortableModel, PortableRun

ROUNDING = 2.0**-24
"""The share of a value that float32 rounds off at most"""
LARGEST_ROUNDING = 2e-6
"""How far float32 may move a value, of its spread or in scaled units, before rows are float64"""
NUM_ROUNDINGS = 8
"""By how many roundings of a number two float32 programs may differ that compute the same"""


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a run; an ensemble reads what any of its members does."""

    signature: Signature
    """Of the predictions"""
    inputs: tuple[str, ...]
    """Columns of `rows` [B, T, inputs]"""
    static: tuple[str, ...]
    """Columns of `static` [B, columns]"""
    future: tuple[str, ...]
    """Columns of `future` [B, H, columns]: those that are known ahead"""
    context: int
    """Rows of a window"""
    fixed_length: bool
    """Whether a window has to have exactly as many"""
    patch: int
    """What a number of rows has to be a multiple of"""
    dtype: str
    """Of inputs and numeric outputs: "float32" or "float64" """
    levels: tuple[str, ...]
    """Of the intervals, in percent"""
    before: tuple[str, ...]
    """Steps of `data.prepare` that come before the model, by name"""
    after: tuple[str, ...] = ()
    """What `predict` does to the model's predictions"""

    @property
    def output(self) -> str:
        """The name of the main output."""
        return "probability" if self.signature.classes else "prediction"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output, "lower", "upper") if self.levels else (self.output,)

    def get_output_shape(self, name: str) -> list[str | int]:
        """[B, H, targets], with quantiles or levels of intervals behind, or [B, H, classes]."""
        signature = self.signature
        shape: list[str | int] = ["batch", signature.steps_out]
        if signature.classes:
            return [*shape, len(signature.classes)]
        shape.append(len(signature.targets))
        if name != self.output:
            return [*shape, len(self.levels)]
        return [*shape, len(signature.quantiles)] if signature.quantiles else shape

    def get_input_shapes(self) -> dict[str, list[str | int]]:
        """Shapes by the name of each input."""
        length = self.context if self.fixed_length else "time"
        shapes: dict[str, list[str | int]] = {"rows": ["batch", length, len(self.inputs)]}
        if self.static:
            shapes["static"] = ["batch", len(self.static)]
        if self.future:
            shapes["future"] = ["batch", self.signature.horizon, len(self.future)]
        return shapes

    def describe(self) -> dict[str, Any]:
        """Return what a user of the file has to know, as JSON."""
        signature = self.signature
        columns = {"rows": self.inputs, "static": self.static, "future": self.future}
        inputs = {
            name: {"shape": shape, "type": self.dtype, "columns": list(columns[name])}
            for name, shape in self.get_input_shapes().items()
        }
        outputs: dict[str, Any] = {}
        for name in self.outputs:
            kind = "float32" if signature.classes else self.dtype
            outputs[name] = {"shape": self.get_output_shape(name), "type": kind}
            if signature.classes:
                outputs[name]["classes"] = list(signature.classes)
            else:
                outputs[name]["columns"] = list(signature.targets)
            if name != self.output:
                outputs[name]["levels"] = list(self.levels)
            elif signature.quantiles:
                outputs[name]["quantiles"] = list(signature.quantiles)
        return {
            "inputs": inputs,
            "outputs": outputs,
            "context": self.context,
            "length": self._describe_length(),
            "horizon": signature.horizon,
            "step": signature.step,
            "state": signature.state,
            "prepare_before": list(self.before),
            "filter_after": list(self.after),
        }

    def _describe_length(self) -> str:
        if self.fixed_length:
            return format_count(self.context, "row")
        if self.signature.state == "carried":
            return "all rows since the start of the series or the last gap"
        rows = f"any multiple of {self.patch} rows" if self.patch > 1 else "any number of rows"
        return f"{rows}; the model was trained on {self.context}"


def make_interface(run: PortableRun) -> Interface:
    """Return the inputs and outputs of a run."""
    members = [one.first for one in run.members]
    _refuse_other_members(run)
    ordered = [run.first, *members]
    contexts = {one.signature.context for one in members}
    return Interface(
        signature=run.signature,
        inputs=_join(one.signature.inputs for one in ordered),
        static=_join(one.signature.static for one in ordered),
        future=_join(one.signature.future for one in ordered if one.signature.future_shape[0]),
        context=max(contexts),
        fixed_length=len(contexts) > 1
        or any(has_fixed_length(one.config.model) for one in members),
        patch=int(np.lcm.reduce([one.config.model.patch for one in members])),
        dtype="float32" if all(map(keeps_digits, members)) else "float64",
        levels=tuple(run.half_widths or ()),
        before=name_steps(run.first),
        after=name_filter(run.first),
    )


def has_fixed_length(model: Model) -> bool:
    """Whether a model takes windows of its context only: its weights belong to single rows."""
    spec = model.spec
    flat = spec.is_sequential and model.pool == "flatten"
    return spec.flattens or spec.is_custom or spec.knows_positions or flat


def keeps_digits(model: PortableModel) -> bool:
    """Whether float32 holds every column closely enough: a value far from zero beside its spread
    would lose digits that the scaled value has. Where windows are divided by their own deviation,
    which may be next to nothing, every digit counts."""
    if model.config.model.normalize == "window":
        return False
    scaler, signature = model.scaler, model.signature
    targets = () if signature.classes else signature.targets
    columns = (*signature.inputs, *signature.static, *targets)
    spreads = zip(columns, measure_spreads(columns, scaler), strict=True)
    return all(
        max(abs(scaler.low[name]), abs(scaler.high[name])) * ROUNDING
        <= LARGEST_ROUNDING * min(scaler.size[name], spread)
        for name, spread in spreads
    )


def measure_spreads(columns: Iterable[str], scaler: Scaler) -> npt.NDArray[np.float64]:
    """Return what differences in each column are measured by: its standard deviation in training.
    A column that was constant there, which `data.scale = "none"` allows, has none: its value."""
    return np.array(
        [scaler.deviation[name] or abs(scaler.high[name]) or 1.0 for name in columns],
        dtype=np.float64,
    )


def widen_limit(limit: float, distance: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the difference, in spreads, that is allowed of numbers that are computed from some so
    many spreads from float32's zero. A float32 network computes a scaled prediction of 100 to no
    more than 1e-5, however it is written."""
    allowed: npt.NDArray[np.float64] = np.maximum(limit, NUM_ROUNDINGS * ROUNDING * distance)
    return allowed


def name_steps(model: PortableModel) -> tuple[str, ...]:
    """Name the steps of `data.prepare`."""
    steps = enumerate(model.config.data.prepare, start=1)
    return tuple(name_step(number, step) for number, step in steps)


def name_filter(model: PortableModel) -> tuple[str, ...]:
    """Name the filter of the predictions, if there is one."""
    chosen = model.config.predict.filter
    settings = ", ".join(
        f"{name} = {value}" for name, value in chosen.model_dump(exclude_none=True).items()
    )
    return () if chosen.kind == "none" else (f"predict.filter ({settings})",)


def _join(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


def _refuse_other_members(run: PortableRun) -> None:
    """Refuse members that cannot be fed from one window: columns of one name are not the same
    numbers, or a state is carried on from before it."""
    steps = run.first.config.data.prepare
    for member in run.members:
        if member.first.config.data.prepare != steps:
            raise UserError(
                f"{member.run.folder}: its data.prepare differs from that of "
                f"{run.members[run.reference].run.folder}, so that one table cannot feed both; "
                "export the members by themselves"
            )
        if len(run.members) > 1 and member.first.signature.state == "carried":
            raise UserError(
                f'{member.run.folder}: was trained with train.state = "carried", so that it needs '
                "more rows than the other members; export the members by themselves"
            )
