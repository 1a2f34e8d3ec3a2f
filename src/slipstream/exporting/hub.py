"""A folder for the Hugging Face Hub, with a model card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.numpy

from slipstream import __version__, runs
from slipstream.base.statistics import BETTER, WORSE
from slipstream.base.text import escape_to_line, format_count, format_number
from slipstream.exporting.formats import ExportSource, WrittenExport
from slipstream.exporting.onnx import files as onnx_files
from slipstream.inference.portable import PortableRun
from slipstream.models.numpy_layers import Weights
from slipstream.reporting import wording
from slipstream.reporting.wording import choose_layout, find_unit, format_moment, format_step
from slipstream.runs.summary import RunSummary, Scores, get_metrics

TASKS = {"classify": "time-series classification", "forecast": "forecast", "estimate": "estimate"}
TAGS = {
    "classify": "tabular-classification",
    "forecast": "time-series-forecasting",
    "estimate": "tabular-regression",
}
"""The Hub's names of tasks"""
METRICS = (
    "mae",
    "rmse",
    "r2",
    "mase",
    "smape",
    "wape",
    "log_loss",
    "balanced_accuracy",
    "accuracy",
)
"""Metrics of the test set in the card's metadata"""


def write_card(source: ExportSource, summary: RunSummary | None, files: Sequence[str]) -> str:
    """Return the card; `summary` is the content of metrics.json, None where a run has none."""
    name, task = source.run.first.config.name, find_task(source)
    parts = [
        "---",
        *_format_yaml(_describe_metadata(source, summary)),
        "---",
        f"# {name}",
        "",
        _describe_model(source),
        "",
        "## Results",
        "",
        *(_describe_results(summary) if summary else ["The run holds no scores."]),
        "",
        "## Inputs and outputs",
        "",
        *_describe_interface(source),
        "",
        "## Data",
        "",
        *(_describe_data(summary) if summary else ["The run holds no description of its data."]),
        "",
        "## Use",
        "",
        *_describe_use(source, files),
        "",
        "## Limits",
        "",
        *_describe_limits(source, summary, task),
    ]
    return "\n".join(parts) + "\n"


def find_task(source: ExportSource) -> str:
    """Return "classify", "forecast" or "estimate"."""
    signature = source.interface.signature
    if signature.classes:
        return "classify"
    return "forecast" if signature.horizon else "estimate"


def _describe_metadata(source: ExportSource, summary: RunSummary | None) -> dict[str, Any]:
    """Return the front matter that the Hub reads; the licence is the user's to choose."""
    name, tag = source.run.first.config.name, TAGS[find_task(source)]
    kinds = dict.fromkeys(member.first.config.model.kind for member in source.run.members)
    content: dict[str, Any] = {}
    if license_name := source.options.get("license"):
        content["license"] = license_name
    content |= {
        "library_name": "slipstream",
        "pipeline_tag": tag,
        "tags": ["slipstream", "time-series", "onnx", *kinds],
    }
    if not summary:
        return content
    mean = summary.get("ensemble") if len(source.run.members[0].models) > 1 else None
    scores = get_metrics(mean or summary)
    measured = [
        {"type": key, "value": scores["test"][key], "name": f"test {key}"}
        for key in METRICS
        if scores["test"].get(key) is not None
    ]
    result = {
        "task": {"type": tag},
        "dataset": {"type": "private", "name": f"test set of {name}"},
        "metrics": measured,
    }
    return content | {"model-index": [{"name": name, "results": [result]}]}


def _format_yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a YAML block; scalars are written as JSON, which is YAML."""
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield f"{indent}{key}:"
            yield from _format_yaml(entry, indent + "  ")
        elif isinstance(entry, list):
            yield f"{indent}{key}:"
            for item in entry:
                if isinstance(item, dict):
                    first, *further = _format_yaml(item, indent + "  ")
                    yield f"{indent}- {first.strip()}"
                    yield from further
                else:
                    yield f"{indent}- {json.dumps(item)}"
        else:
            yield f"{indent}{key}: {json.dumps(entry)}"


def _describe_model(source: ExportSource) -> str:
    """Say in a sentence or two what the model is."""
    signature, model = source.interface.signature, source.run.first.config.model
    targets = ", ".join(map(_quote, signature.targets))
    rows = format_count(source.interface.context, "row")
    task = {
        "classify": f"classifies windows of {rows} as one of {', '.join(signature.classes)}",
        "forecast": f"forecasts {targets} {format_count(signature.horizon, 'row')} ahead from "
        f"windows of {rows}",
        "estimate": f"estimates {targets} at the last row of a window of {rows}",
    }[find_task(source)]
    weights = sum(
        array.size
        for member in source.run.members
        for network in member.models
        for array in network.weights.values()
    )
    kind = f"{source.run.description} ({model.kind}" + (
        f", {weights:,} weights)" if weights else ")"
    )
    return f"This model {task}. It is {kind}, trained with Slipstream."


def _describe_results(summary: RunSummary) -> Iterator[str]:
    """Yield the test metrics of the model and of the baselines."""
    layout = choose_layout(summary)
    windows = format_count(summary["windows"][layout.subset], "window")
    yield f"On the {layout.description} ({windows}), {layout.units}:"
    yield ""
    baselines = summary["baselines"]
    results: dict[str, Scores | None] = {"model": summary, "ensemble": summary.get("ensemble")}
    results |= baselines
    rows = [
        [
            f"{name}: {baseline['what']}" if (baseline := baselines.get(name)) else name,
            *(format_number(column.read(result), column.decimals) for column in layout.compact),
        ]
        for name, result in results.items()
        if result
    ]
    yield from _format_table(["", *(column.heading for column in layout.compact)], rows)
    yield ""
    yield wording.describe_verdict(summary)
    yield ""
    quantiles = filter(None, [wording.describe_quantiles(summary)])
    lanes = (*wording.describe_lanes(summary), *wording.describe_members(summary))
    for line in (*quantiles, *lanes):
        yield f"- {line}"


def _describe_interface(source: ExportSource) -> Iterator[str]:
    """Yield the tensors of model.onnx."""
    content = source.interface.describe()
    rows = []
    for direction in ("inputs", "outputs"):
        for name, tensor in content[direction].items():
            labels = tensor.get("columns") or tensor.get("classes") or []
            further = [
                f"{key} {', '.join(map(str, tensor[key]))}"
                for key in ("quantiles", "levels")
                if key in tensor
            ]
            shape = f"[{', '.join(map(str, tensor['shape']))}]"
            contents = "; ".join([", ".join(map(_quote, labels)), *further])
            rows.append([direction[:-1], _quote(name), shape, tensor["type"], contents])
    yield f"All values are in physical units. Length: {content['length']}."
    yield ""
    yield from _format_table(["", "name", "shape", "type", "columns"], rows)
    if before := content["prepare_before"]:
        yield ""
        yield (
            f"`slipstream predict` takes the data as they were before these steps and carries them "
            f"out; `model.onnx` takes their results: {', '.join(before)}."
        )


def _describe_data(summary: RunSummary) -> Iterator[str]:
    """Yield a description of the training data."""
    data, windows = summary["data"], summary["windows"]
    facts = [f"{format_count(data['rows'], 'row')} in {data['series']:,} series"]
    if span := data.get("range"):
        first, last = (format_moment(value, data["dates"]) for value in span)
        facts.append(f"from {first} to {last}")
    if step := data.get("step"):
        facts.append(f"one row every {format_step(step, data['dates'])}")
    yield (
        f"{', '.join(facts)}. Windows: "
        + ", ".join(f"{count:,} {name}" for name, count in windows.items())
        + "."
    )
    yield ""
    rows = []
    for name, column in data["columns"].items():
        low, high = column.get("training_range") or (None, None)
        limits = "" if low is None else f"{format_number(low)} to {format_number(high)}"
        missing = "–" if column["missing"] is None else f"{column['missing']:,}"
        rows.append(
            [
                _quote(name),
                ", ".join(column["roles"]),
                column.get("unit") or find_unit(name),
                limits,
                missing,
            ]
        )
    yield from _format_table(["column", "role", "unit", "range in training", "missing"], rows)


def _describe_use(source: ExportSource, files: Sequence[str]) -> Iterator[str]:
    """Yield commands and code that use the folder."""
    interface = source.interface
    shapes = {
        name: [1, *(interface.context if size == "time" else size for size in dims[1:])]
        for name, dims in interface.get_input_shapes().items()
    }
    yield "The folder is a Slipstream run:"
    yield ""
    yield from ("```bash", "slipstream predict FOLDER data.csv", "slipstream serve FOLDER", "```")
    yield ""
    yield "`model.onnx` needs onnxruntime only:"
    yield ""
    yield "```python"
    yield "import numpy as np"
    yield "import onnxruntime"
    yield ""
    yield 'session = onnxruntime.InferenceSession("model.onnx")'
    yield "inputs = {"
    for name, shape in shapes.items():
        yield f'    "{name}": np.zeros({tuple(shape)}, dtype=np.{interface.dtype}),'
    yield "}"
    yield f'print(session.run(["{interface.output}"], inputs)[0].shape)'
    yield "```"
    if "step.onnx" in files:
        yield ""
        yield (
            "`step.onnx` takes one row and the states, which begin at zero, and returns the "
            "prediction and the new states."
        )


def _describe_limits(source: ExportSource, summary: RunSummary | None, task: str) -> Iterator[str]:
    yield (
        "- The figures hold for data like the test set. Outside the ranges in training, the "
        "predictions are extrapolations that were not measured."
    )
    if summary and (outcome := wording.judge(summary)) != BETTER:
        verdict = "did better" if outcome == WORSE else "is not shown to be worse"
        yield f"- A simple baseline {verdict} on the test set: see the results."
    if task != "classify" and not source.interface.levels:
        yield "- The predictions come without intervals."
    if source.interface.levels:
        yield (
            "- The intervals are as wide as the errors on the validation set were; where the data "
            "drift, they cover less."
        )
    if source.interface.signature.output_range:
        low, high = source.interface.signature.output_range
        yield f"- Predictions are limited to {low:g} to {high:g}."


def _format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table."""
    for row in (headings, ["---"] * len(headings), *rows):
        cells = (escape_to_line(cell).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def _quote(name: str) -> str:
    """Return a column's name as Markdown code; a name with a backquote stays unchanged."""
    return name if "`" in name else f"`{name}`"


CARD, DESCRIPTION, WEIGHTS = "README.md", "config.json", "model.safetensors"


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the ONNX graphs, the weights and the model card."""
    written = onnx_files.write(source, folder)
    safetensors.numpy.save_file(
        join_weights(source.run), folder / WEIGHTS, metadata={"format": "pt"}
    )
    runs.write_json(folder / DESCRIPTION, describe(source))
    summary = None
    own = source.run.run.folder
    if (own / "metrics.json").exists() and not runs.describe_untested(own):
        summary = runs.read_metrics(own)
    names = sorted(path.name for path in folder.iterdir())
    (folder / CARD).write_text(write_card(source, summary, names), encoding="utf-8")
    return written


def join_weights(run: PortableRun) -> Weights:
    """Return the weights of all networks that predict; of several, the names begin with the
    network's number."""
    networks = [
        network
        for member, weight in zip(run.members, run.weights, strict=True)
        for network in member.models
        if weight
    ]
    if len(networks) == 1:
        return networks[0].weights
    return {
        f"{number}/{name}": array
        for number, network in enumerate(networks)
        for name, array in network.weights.items()
    }


def describe(source: ExportSource) -> dict[str, Any]:
    """Return config.json: the network, the columns and the scaling of each member."""
    members = [
        {
            "model": member.first.config.model.model_dump(),
            "signature": member.first.signature.model_dump(),
            "scaler": vars(member.first.scaler),
            "networks": len(member.models),
            "weight": weight,
        }
        for member, weight in zip(source.run.members, source.run.weights, strict=True)
    ]
    return {
        "library_name": "slipstream",
        "slipstream_version": __version__,
        "model_type": source.run.first.config.model.kind,
        "interface": source.interface.describe(),
        "members": members,
    }
