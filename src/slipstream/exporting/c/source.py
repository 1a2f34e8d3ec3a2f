"""The text of a model's C files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from slipstream.config import Signature
from slipstream.exporting.c.arrays import (
    LANES,
    ConstArrays,
    format_double,
    format_floats,
    format_list,
)
from slipstream.exporting.c.header import describe_model, describe_step
from slipstream.exporting.c.memory import (
    About,
    CLayout,
    CSettings,
    StepParts,
    format_defines,
    list_cells,
    list_scratch,
    list_state,
    measure_sizes,
)
from slipstream.exporting.c.networks import (
    ACTIVATIONS,
    NetworkShape,
    add_network,
    list_defines,
)
from slipstream.portable.filters import FilterDesign, design_filter
from slipstream.portable.model import PortableModel, Widths
from slipstream.portable.networks.steps import explain_no_steps
from slipstream.stats import find_median

if TYPE_CHECKING:
    from slipstream.exporting.c.prepare import PreparedColumns

SMALLEST_VARIANCE = 1e-5
"""Of a normalized window or layer, where it is divided by"""


@dataclass(frozen=True)
class CSource:
    """A model in C."""

    layout: CLayout
    values: Mapping[str, Any]
    """What the templates name"""

    @property
    def files(self) -> dict[str, str]:
        """The texts of the source and its header by name."""
        name = self.layout.settings.name
        return {
            f"{name}.c": render("model.c.j2", self.values),
            f"{name}.h": render("model.h.j2", self.values),
        }


def make_source(
    models: Sequence[PortableModel],
    settings: CSettings,
    *,
    half_widths: Widths | None = None,
    about: About | None = None,
) -> CSource:
    """Return the C code of networks whose mean is the prediction; they differ in weights only."""
    first, arrays = models[0], ConstArrays(settings.int8)
    holds = first.config.data.missing == "forward"
    carried = settings.carried and explain_no_steps(first.config.model) is None
    shape = NetworkShape(first.config.model, first.signature, holds, carried)
    networks = [add_network(arrays, shape, one.weights, i) for i, one in enumerate(models)]
    prepared = _prepare(first, settings)
    design = None
    if settings.filtered:
        design = design_filter(first.config.predict.filter, first.signature.step)
    parts = StepParts(
        networks=len(models),
        carried=carried,
        prepared=prepared.num_state if prepared else 0,
        padded=prepared is not None and prepared.pad_rows > 0,
        filter_past=0 if design is None else 2 * len(design.sections) + len(design.weights),
        has_window=first.signature.state == "windows",
    )
    scaling = _list_scaling(first)
    constants = arrays.num_bytes + scaling.pop("num_bytes") + 16 * len(shape.slots)
    constants += 8 * (prepared.num_constants if prepared else 0)
    constants += 0 if design is None else design.sections.nbytes + design.weights.nbytes
    constants += sum(one.nbytes for one in (half_widths or {}).values())
    sizes = measure_sizes(shape, settings, parts, constants, arrays.num_weights)
    layout = CLayout(first, shape, settings, parts, sizes, prepared, about or About())
    values = {
        "arrays": "\n".join(arrays.lines),
        "networks": networks,
        "cells": [one.text for one in list_cells(shape)],
        "state": [one.text for one in list_state(shape, settings, parts)],
        "work": [one.text for one in list_scratch(shape, settings, parts)],
        "carried": parts.carried,
        "has_window": parts.has_window,
        "about": describe_model(layout),
        "run": layout.about.run,
        "step_comment": describe_step(layout),
        "raw_columns": prepared.columns if prepared else (),
        "pad_rows": 0,
        **(prepared.values if prepared else {}),
        "filter": None if design is None else _list_filter(design),
        "half_widths": [
            (level, format_list(widths.ravel(), double=True))
            for level, widths in (half_widths or {}).items()
        ],
        **_list_shape(shape, settings),
        **scaling,
    }
    return CSource(layout, values)


def _prepare(model: PortableModel, settings: CSettings) -> PreparedColumns | None:
    if settings.after_prepare or not model.config.data.prepare:
        return None
    from slipstream.exporting.c.prepare import prepare_in_c  # takes a while to import

    prepared = prepare_in_c(model, settings.name)
    return prepared if prepared.steps else None


def _list_shape(shape: NetworkShape, settings: CSettings) -> dict[str, Any]:
    """Return what the templates have to know of the shapes."""
    signature, model, name = shape.signature, shape.model, settings.name
    value = f"const {name}_value *"
    reads_ahead = signature.future_shape[0] > 0
    extra = [*(["constants"] if signature.static else []), *(["future"] if reads_ahead else [])]
    params = ", ".join(f"{value}{one}" for one in extra)
    recurrent = shape.template == "recurrent"
    return {
        "p": name,
        "version": metadata.version("slipstream"),
        "lanes": LANES,
        "int8": settings.int8,
        "stored": "int8_t" if settings.int8 else "float",
        "value_type": settings.value_type,
        "kind": model.kind,
        "network_template": shape.template,
        "features": signature.model_inputs,
        "ahead_columns": len(signature.future),
        "reads_ahead": reads_ahead,
        "targets": signature.model_targets,
        "shared": signature.model_shared,
        "channels": signature.sequences_per_window,
        "quantiles": signature.outputs,
        "sorts": len(signature.quantiles) > 1,
        "median": find_median(signature.quantiles)[0],
        "median_share": find_median(signature.quantiles)[2],
        "classes": signature.classes,
        "steps": signature.steps_out,
        "context": signature.context,
        "inputs": signature.inputs,
        "rows_at_once": shape.rows_at_once,
        "extra": signature.static_width,
        "fixed": len(signature.static),
        "width": shape.width,
        "layers": len(shape.sizes),
        "directions": shape.directions,
        "layer_norm": recurrent and model.layer_norm,
        "pool": None if shape.is_flat else model.pool,
        "normalize": model.normalize,
        "decoder": shape.decoder,
        "holds": shape.holds,
        "values_are": _name_values(signature),
        "shape_lines": format_defines(list_defines(shape)),
        "uses_dense": not shape.is_flat or bool(shape.sizes),
        "activation": ACTIVATIONS[model.activation],
        "smallest_variance": f"{format_double(float(np.float32(SMALLEST_VARIANCE)))}f",
        "norm_epsilon": SMALLEST_VARIANCE,
        "first_slots": _list_ints(np.cumsum([0, *shape.slots[:-1]])),
        "num_slots": _list_ints(shape.slots),
        "extra_params": params,
        "comma_extra_params": f", {params}" if params else "",
        "extra_arguments": ", ".join(extra),
        "comma_extra_arguments": "".join(f", {one}" for one in extra),
    }


def _name_values(signature: Signature) -> str:
    if signature.classes:
        return "a probability for each class"
    return "its quantiles" if signature.quantiles else "the prediction"


def _list_filter(design: FilterDesign) -> dict[str, Any]:
    sections = design.sections
    return {
        "kind": design.kind,
        "delay_rows": design.delay_rows,
        "num_sections": len(sections),
        "rows": len(design.weights),
        "numbers": format_list([*sections.ravel(), *design.weights], double=True),
    }


def _list_ints(values: Sequence[int] | Any) -> str:
    return "{" + ", ".join(str(int(one)) for one in values) + "}"


def _list_scaling(model: PortableModel) -> dict[str, Any]:
    """Return the initializers of the scaling of every column, and how many bytes they take."""
    signature, scaler = model.signature, model.scaler
    groups = {"input": signature.inputs, "constant": signature.static}
    if not signature.classes:
        groups["target"] = signature.targets
    result: dict[str, Any] = {"num_bytes": 16 * sum(map(len, groups.values())), "lowest": ""}
    for group, names in groups.items():
        for part in ("shift", "size"):
            numbers = [getattr(scaler, part)[name] for name in names]
            result[f"{group}_{part}"] = format_list(numbers, double=True)
    if signature.output_range is not None and not signature.classes:
        low, high = signature.output_range
        result |= {"output_low": format_double(low), "output_high": format_double(high)}
        for name, edge, outwards in (("lowest", low, -math.inf), ("highest", high, math.inf)):
            scaled = [(edge - scaler.shift[one]) / scaler.size[one] for one in signature.targets]
            rounded = np.nextafter(np.array(scaled, dtype=np.float32), np.float32(outwards))
            result[name] = "{" + ", ".join(format_floats(rounded)) + "}"
        result["num_bytes"] += 8 * len(signature.targets)
    return result


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template."""
    return _get_environment().get_template(template).render(values)


@cache
def _get_environment() -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=False,  # this is C
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_template),
    )


def _read_template(name: str) -> str:
    return resources.files("slipstream.exporting.c").joinpath("templates", name).read_text("utf-8")
