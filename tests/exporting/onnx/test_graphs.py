"""The ONNX graphs compute what PyTorch computes, whatever the model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.exporting.formats import make_interface, to_inputs
from slipstream.exporting.onnx.graph import (
    build_step_graph,
    build_window_graph,
    explain_no_step_graph,
)
from slipstream.exporting.onnx.sessions import open_session
from slipstream.exporting.verification import Differences
from tests.conftest import KINDS, mostly_slow
from tests.exporting.random_models import RandomRun, make_nearly_constant, make_signature

LIMIT = 1e-5


@st.composite
def models(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Settings of [model] that training accepts, for a context of 8."""
    model: dict[str, Any] = {"kind": kind, "normalize": draw(st.sampled_from(NORMALIZE))}
    if kind in ("lstm", "gru"):
        model["hidden"] = draw(st.sampled_from([[5], [4, 6], [3, 3, 3]]))
        model["bidirectional"], model["layer_norm"] = draw(st.booleans()), draw(st.booleans())
    elif kind in ("mlp", "nhits"):
        model["hidden"] = draw(st.sampled_from([[5], [6, 4]]))
        activations = ["relu", "gelu", "silu", "elu", "leaky_relu", "tanh"]
        model["activation"] = draw(st.sampled_from(activations))
        model["stacks"] = draw(st.integers(1, 4))
    elif kind != "linear":
        model |= {"hidden": 6, "layers": draw(st.integers(1, 2)), "heads": 2}
        model["positions"] = draw(st.sampled_from(["learned", "sinusoidal"]))
        model["expansion"] = draw(st.integers(1, 2))
        model["kernel_size"] = draw(st.integers(1, 3))
    if kind not in ("mlp", "linear", "nhits"):
        model["patch"] = draw(st.sampled_from([1, 1, 2, 4]))
        model["pool"] = draw(st.sampled_from(["last", "mean", "attention", "flatten"]))
    return model


NORMALIZE = ["none", "last", "window"]
QUANTILES = [(0.1, 0.5, 0.9), (0.1, 0.9), (0.05, 0.4, 0.75, 0.95), (0.3,), (0.7, 0.8)]


@st.composite
def signatures(draw: st.DrawFn) -> Any:
    """Columns, horizon, channels, quantiles and classes that training accepts."""
    horizon = draw(st.integers(0, 3))
    others = draw(st.integers(0, 2))
    task = draw(st.sampled_from(["numbers", "numbers", "quantiles", "classes"]))
    independent = task != "classes" and draw(st.booleans())
    shared = draw(st.integers(1, 3)) if independent or not others else draw(st.integers(0, 2))
    more = 0 if independent or (shared and draw(st.booleans())) else 1
    inputs = tuple(f"x{i}" for i in range(others)) + tuple(f"y{i}" for i in range(shared))
    targets = tuple(f"y{i}" for i in range(shared + more))
    if task == "classes":
        targets = (f"y{draw(st.integers(0, shared))}",) if shared else ("y0",)
        inputs = tuple(name for name in inputs if name != targets[0]) + (
            targets if targets[0] in inputs else ()
        )
        shared = len(set(inputs) & set(targets))
    ahead = draw(st.integers(0, others)) if horizon else 0
    return make_signature(
        inputs=inputs,
        targets=targets,
        shared=shared,
        horizon=horizon,
        static=tuple(f"s{i}" for i in range(draw(st.integers(0, 2)))),
        future=inputs[:ahead],
        channels="independent" if independent else "together",
        quantiles=draw(st.sampled_from(QUANTILES)) if task == "quantiles" else (),
        classes=("low", "mid", "high") if task == "classes" else (),
    )


def compare(run: RandomRun, outputs: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert outputs.keys() == wanted.keys()
    differences = Differences(make_interface(run.portable), run.scaler)
    differences.add(outputs, wanted)
    return differences.max_rel


def check_windows(run: RandomRun) -> None:
    """Compare batches of 1 and 7 at every length that the model takes."""
    interface = make_interface(run.portable)
    session = open_session(build_window_graph(run.portable).SerializeToString())
    context = interface.context
    lengths = {context} if interface.fixed_length else {interface.patch, context, 2 * context}
    for length in lengths:
        for batch in (1, 7):
            windows = run.draw_windows(batch, length)
            values = session.run(list(interface.outputs), to_inputs(windows, interface.dtype))
            outputs = dict(zip(interface.outputs, values, strict=True))
            assert compare(run, outputs, run.predict(windows)) <= LIMIT


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "lstm", "mlp"))
@settings(max_examples=25)
@given(data=st.data())
def test_windows_give_what_the_model_predicts(kind, data):
    model, signature = data.draw(models(kind)), data.draw(signatures())
    offset = data.draw(st.sampled_from([0.0, 3.0, 1e7]))
    if offset < 1e7 and data.draw(st.booleans()):
        model["output_range"] = [-2.0, 2.5]
    count = data.draw(st.sampled_from([1, 1, 3]))
    levels = ("80", "95") if not signature.classes and data.draw(st.booleans()) else ()
    check_windows(RandomRun(model, signature, count=count, offset=offset, levels=levels))


def run_steps(run: RandomRun, rows: Any, static: Any = None) -> dict[str, Any]:
    """The outputs at the last of these rows, one at a time from zero states."""
    interface = make_interface(run.portable)
    session = open_session(build_step_graph(run.portable).SerializeToString())
    outputs = [one.name for one in session.get_outputs()]
    states = {}
    for one in session.get_inputs():
        if one.name.startswith("state_"):
            sequences = len(rows) * run.signature.sequences_per_window
            states[one.name] = np.zeros((sequences, *one.shape[1:]), dtype=np.float32)
    for number in range(rows.shape[1]):
        inputs = {"row": rows[:, number].astype(interface.dtype), **states}
        if static is not None:
            inputs["static"] = static.astype(interface.dtype)
        values = dict(zip(outputs, session.run(outputs, inputs), strict=True))
        states = {name: values[f"new_{name}"] for name in states}
    return {name: values[name] for name in interface.outputs}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ({"kind": "lstm", "hidden": [8, 5]}, {}),
        ({"kind": "lstm", "hidden": [6], "layer_norm": True}, {"static": ("s",)}),
        ({"kind": "gru", "hidden": [8, 5]}, {"horizon": 0, "targets": ("d",), "shared": 0}),
        ({"kind": "gru", "hidden": [4]}, {"classes": ("x", "y"), "horizon": 0}),
        ({"kind": "tcn", "hidden": 6, "layers": 3}, {}),
        ({"kind": "tcn", "hidden": 6, "layers": 2, "kernel_size": 1}, {}),
        (
            {"kind": "lstm", "hidden": [6]},
            {"channels": "independent", "targets": ("b", "c"), "shared": 2},
        ),
    ],
    ids=lambda value: value.get("kind") if "kind" in value else "",
)
def test_400_single_steps_equal_one_pass(model, fields):
    run = RandomRun(model, make_signature(**fields))
    windows = run.draw_windows(3, 400)
    outputs = run_steps(run, windows.rows, windows.static)
    assert compare(run, outputs, run.predict(windows)) <= LIMIT


def test_steps_of_several_networks_have_states_of_their_own():
    run = RandomRun({"kind": "gru", "hidden": [4]}, make_signature(), count=3, levels=("80",))
    windows = run.draw_windows(2, 20)
    assert compare(run, run_steps(run, windows.rows), run.predict(windows)) <= LIMIT


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"kind": "mlp"}, "reads a window as a whole"),
        ({"kind": "transformer", "hidden": 4, "heads": 2}, "reads a window as a whole"),
        ({"kind": "lstm", "bidirectional": True}, "backwards"),
        ({"kind": "gru", "pool": "mean"}, 'model.pool = "mean"'),
        ({"kind": "lstm", "patch": 2}, "model.patch = 2"),
        ({"kind": "tcn", "normalize": "last"}, 'model.normalize = "last"'),
    ],
)
def test_there_are_no_steps_where_a_model_reads_more_than_one_row(model, reason):
    run = RandomRun({"hidden": 4, "layers": 1, **model}, make_signature())
    assert reason in (explain_no_step_graph(run.portable) or "")


def test_columns_far_from_zero_are_read_in_float64():
    near = make_interface(RandomRun({"kind": "linear"}, make_signature()).portable)
    far = make_interface(RandomRun({"kind": "linear"}, make_signature(), offset=1e6).portable)
    assert (near.dtype, far.dtype) == ("float32", "float64")


@pytest.mark.parametrize("seed", range(4))
def test_nearly_constant_windows_keep_their_digits(seed):
    """Their normalization divides by next to nothing, and multiplies what rounding takes: of rows,
    which are float64 for that reason, and of each window's mean, which is that of differences."""
    signature = make_signature(targets=("d",), shared=0)
    run = RandomRun({"kind": "linear", "normalize": "window"}, signature)
    interface, windows = make_interface(run.portable), run.draw_windows(7, 8, seed)
    session = open_session(build_window_graph(run.portable).SerializeToString())

    def measure_error(spread: float, dtype: type = np.float64) -> float:
        calm = make_nearly_constant(windows, spread)
        read = calm._replace(rows=calm.rows.astype(dtype))
        (values,) = session.run(None, to_inputs(read, interface.dtype))
        return compare(run, {"prediction": values}, run.predict(calm, exact=True))

    for spread in (1e-1, 1e-2, 1e-3):
        assert measure_error(spread) <= LIMIT
        calm = make_nearly_constant(windows, spread)
        assert compare(run, run.predict(calm), run.predict(calm, exact=True)) <= LIMIT
    assert measure_error(1e-3) < measure_error(1e-3, np.float32)


def test_the_metadata_name_columns_context_and_step():
    signature = make_signature(static=("s",), future=("a",))
    graph = build_window_graph(RandomRun({"kind": "linear"}, signature).portable)
    about = {one.key: json.loads(one.value) for one in graph.metadata_props}
    assert about["inputs"]["rows"]["columns"] == ["a", "b", "c"]
    assert about["inputs"]["static"]["columns"] == ["s"]
    assert about["inputs"]["future"] == {
        "shape": ["batch", 2, 1],
        "type": "float32",
        "columns": ["a"],
    }
    assert about["outputs"]["prediction"]["columns"] == ["c"]
    assert (about["context"], about["horizon"], about["step"]) == (8, 2, 1.0)


def test_graphs_are_built_without_torch():
    code = (
        "import sys, slipstream.exporting.onnx.graph, slipstream.exporting.onnx.files; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
