"""How the C code of a model is written, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.exporting.c.arrays import LANES
from slipstream.exporting.c.networks import NetworkShape, list_work
from slipstream.portable.model import PortableModel

if TYPE_CHECKING:
    from slipstream.exporting.c.prepare import PreparedColumns

BYTES = {"float": 4, "int32_t": 4, "double": 8}


@dataclass(frozen=True)
class CSettings:
    """How a model is written."""

    name: str = "slip"
    """The prefix of files, functions and constants"""
    int8: bool = False
    """Whether matrices have 8 bits and a scale for each row"""
    double: bool = False
    """Whether rows and predictions are double: float would lose digits of some column"""
    carried: bool = True
    """Whether a step carries the network's state, where that is possible, instead of a window"""
    after_prepare: bool = False
    """Whether rows come as they are after the steps of `data.prepare`"""
    filtered: bool = True
    """Whether a step filters its predictions, where the run does"""

    @property
    def value_type(self) -> str:
        return "double" if self.double else "float"


@dataclass(frozen=True)
class CSizes:
    """What a model takes on a 32-bit microcontroller, without its code."""

    flash_bytes: int
    """Constant arrays and tables"""
    scratch_bytes: int
    """Memory that all calls share"""
    state_bytes: int
    """Memory of one series"""
    num_weights: int
    step_multiply_adds: int
    window_multiply_adds: int | None
    """None where windows are not computed"""


@dataclass(frozen=True)
class StepParts:
    """What a step does beside the network."""

    networks: int
    carried: bool
    prepared: int = 0
    """Numbers that the steps of `data.prepare` keep"""
    padded: bool = False
    """Whether rows are put before the first one"""
    filter_past: int = 0
    """Numbers that `predict.filter` keeps of the past"""
    has_window: bool = True
    """Whether windows are computed at all, which a model for a carried state was not trained on"""


class About(NamedTuple):
    """What the header says of a model's origin."""

    run: str = ""
    units: Mapping[str, str] = {}
    """Of columns, where they are known"""


@dataclass(frozen=True)
class CLayout:
    """Everything that decides what the C code looks like, but for the weights."""

    model: PortableModel
    shape: NetworkShape
    settings: CSettings
    parts: StepParts
    sizes: CSizes
    prepared: PreparedColumns | None
    about: About


class StructMember(NamedTuple):
    """A member of a struct."""

    kind: str
    name: str
    length: int = 0
    """Of an array; 0 for a single value"""
    num_bytes: int = 4
    """Of one value"""

    @property
    def text(self) -> str:
        array = f"[{self.length}]" if self.length else ""
        return f"{self.kind} {self.name}{array}"

    @property
    def total(self) -> int:
        return max(self.length, 1) * self.num_bytes


def list_cells(shape: NetworkShape) -> list[StructMember]:
    """Return the members of a network's state."""
    if shape.is_flat:
        return []
    result = [StructMember("float", name, count) for name, count in shape.cells.items()]
    if shape.template == "tcn":
        result += [
            StructMember("int32_t", "slot", len(shape.slots)),
            StructMember("int32_t", "count"),
        ]
    return result


def list_state(shape: NetworkShape, settings: CSettings, parts: StepParts) -> list[StructMember]:
    """Return the members of a series' state, those of 8 bytes first."""
    value = StructMember(f"{settings.name}_value", "", 0, BYTES[settings.value_type])
    signature, inputs = shape.signature, len(shape.signature.inputs)
    result = [StructMember("double", "prepare", parts.prepared, 8)] if parts.prepared else []
    if parts.filter_past:
        targets = 1 if signature.classes else len(signature.targets)
        outputs = signature.steps_out * targets * signature.outputs
        result.append(StructMember("double", "filter_first", outputs, 8))
        result.append(StructMember("double", "filter_past", outputs * parts.filter_past, 8))
    if shape.holds:
        result.append(value._replace(name="last", length=inputs))
    if parts.carried:
        cells = sum(one.total for one in list_cells(shape))
        count = parts.networks * signature.sequences_per_window
        result.append(StructMember(f"{settings.name}_cells", "cells", count, cells))
    else:
        result.append(value._replace(name="ring", length=signature.context * inputs))
        result.append(StructMember("int32_t", "next"))
    if parts.filter_past:
        result += [StructMember("int32_t", "filtered"), StructMember("int32_t", "filter_next")]
    if parts.padded:
        result.append(StructMember("int32_t", "padded"))
    return [*result, StructMember("int32_t", "rows")]


def list_scratch(shape: NetworkShape, settings: CSettings, parts: StepParts) -> list[StructMember]:
    """Return the members of the memory that calls share, beside rows and outputs."""
    result = [StructMember("float", name, count) for name, count in list_work(shape).items()]
    if not shape.is_flat and parts.has_window:
        cells = sum(one.total for one in list_cells(shape))
        result.append(StructMember(f"{settings.name}_cells", "cells", 0, cells))
        if shape.model.pool == "attention":
            result += [StructMember("float", "largest"), StructMember("float", "weights")]
    return [*result, StructMember("int32_t", "failed")]


def measure_sizes(
    shape: NetworkShape, settings: CSettings, parts: StepParts, constants: int, num_weights: int
) -> CSizes:
    """Return the sizes of a model whose constants take so many bytes."""
    signature = shape.signature
    outputs = signature.steps_out * signature.model_targets * signature.outputs
    rows = shape.rows_at_once * signature.model_inputs
    token, head = shape.count_multiply_adds()
    passes = parts.networks * signature.sequences_per_window
    window = passes * (token * (1 if shape.is_flat else shape.tokens) + head)
    return CSizes(
        flash_bytes=constants,
        scratch_bytes=4 * (rows + outputs + max(outputs, LANES))
        + _measure(list_scratch(shape, settings, parts)),
        state_bytes=_measure(list_state(shape, settings, parts)),
        num_weights=num_weights,
        step_multiply_adds=passes * (token + head) if parts.carried else window,
        window_multiply_adds=window if parts.has_window else None,
    )


def _measure(members: Iterable[StructMember]) -> int:
    """Return the bytes of a struct; members of 8 bytes have to come first."""
    every = list(members)
    total = sum(one.total for one in every)
    return total + total % 8 if any(one.num_bytes == 8 for one in every) else total


def format_defines(defines: Mapping[str, int]) -> str:
    return "\n".join(f"#define {name} {value}" for name, value in defines.items())
