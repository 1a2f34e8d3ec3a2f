"""The model repository for NVIDIA Triton: its settings fit the graphs inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import slipstream
from slipstream.exporting.onnx.sessions import open_session
from tests.conftest import close
from tests.exporting.small_runs import train_run

TYPES = {"TYPE_FP32": onnx.TensorProto.FLOAT, "TYPE_FP64": onnx.TensorProto.DOUBLE}


def parse(text: str) -> dict[str, list[Any]]:
    """Read protobuf's text format: fields with all their values, messages as dicts."""
    tokens = iter(re.findall(r'"[^"]*"|[\w.-]+|[{}:\[\],]', text))
    return parse_message(tokens)


def parse_message(tokens: Iterator[str]) -> dict[str, list[Any]]:
    message: dict[str, list[Any]] = {}
    for name in tokens:
        if name == "}":
            break
        values = message.setdefault(name, [])
        first = next(tokens)
        if first == "{":
            values.append(parse_message(tokens))
            continue
        assert first == ":"
        value = next(tokens)
        if value == "[":
            values.append([int(one) for one in iter(lambda: next(tokens), "]") if one != ","])
        else:
            values.append(value.strip('"'))
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    slipstream.export(train_run(folder, "lstm"), to="triton", out=folder / "out")
    return folder / "out" / "models"


def read_config(model: Path) -> dict[str, list[Any]]:
    return parse((model / "config.pbtxt").read_text())


def list_tensors(tensors: Any) -> dict[str, tuple[int, list[int]]]:
    """Types and shapes without the batch by name; -1 for any length."""
    result = {}
    for one in tensors:
        kind = one.type.tensor_type
        dims = [dim.dim_value or -1 for dim in kind.shape.dim]
        assert dims[0] == -1
        result[one.name] = (kind.elem_type, dims[1:])
    return result


@pytest.mark.parametrize("name", ["cell", "cell_step"])
def test_names_types_and_shapes_are_those_of_the_graph(models, name):
    config = read_config(models / name)
    graph = onnx.load(models / name / "1" / "model.onnx").graph
    declared = {
        field: {
            one["name"][0]: (TYPES[one["data_type"][0]], one["dims"][0]) for one in config[field]
        }
        for field in ("input", "output")
    }
    for state in config.get("sequence_batching", [{}])[0].get("state", []):
        shape = TYPES[state["data_type"][0]], state["dims"][0]
        (initial,) = state["initial_state"]
        assert (TYPES[initial["data_type"][0]], initial["dims"][0]) == shape
        assert initial["zero_data"] == ["true"]
        declared["input"][state["input_name"][0]] = shape
        declared["output"][state["output_name"][0]] = shape
    assert declared == {
        "input": list_tensors(graph.input),
        "output": list_tensors(graph.output),
    }
    assert config["name"] == [name]
    assert config["backend"] == ["onnxruntime"]


def test_windows_are_batched_and_rows_belong_to_sequences(models):
    assert "dynamic_batching" in read_config(models / "cell")
    (batching,) = read_config(models / "cell_step")["sequence_batching"]
    assert [one["input_name"][0] for one in batching["state"]] == ["state_h_0", "state_c_0"]
    assert [one["output_name"][0] for one in batching["state"]] == [
        "new_state_h_0",
        "new_state_c_0",
    ]


def test_rows_of_a_sequence_with_its_states_equal_the_window(models):
    """As Triton does it: the states of a request are the inputs of the next one."""
    (batching,) = read_config(models / "cell_step")["sequence_batching"]
    windows, step = (
        open_session(models / name / "1" / "model.onnx") for name in ("cell", "cell_step")
    )
    rows = np.random.default_rng(0).normal(15, 3, (2, 16, 2)).astype(np.float32)
    pairs = {one["input_name"][0]: one["output_name"][0] for one in batching["state"]}
    states = {
        one["input_name"][0]: np.zeros((2, *one["dims"][0]), np.float32)
        for one in batching["state"]
    }
    for at in range(16):
        names = ["prediction", *pairs.values()]
        prediction, *after = step.run(names, {"row": rows[:, at], **states})
        states = dict(zip(pairs, after, strict=True))
    close(prediction, windows.run(["prediction"], {"rows": rows})[0])


def test_independent_channels_have_no_model_for_single_rows(folder, tmp_path):
    run = train_run(folder, "channels")
    result = slipstream.export(run, to="triton", out=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "models").iterdir()] == ["run"]
    assert any("no model for single rows" in note for note in result["notes"])
