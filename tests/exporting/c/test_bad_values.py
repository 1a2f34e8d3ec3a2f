"""C code never calls something a prediction that is not one, and recovers from bad rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.model import SPECS
from slipstream.exporting.c.files import CLibrary
from slipstream.exporting.formats import make_interface, to_inputs
from tests.conftest import slow
from tests.exporting.c.programs import compile_run, needs_compiler
from tests.exporting.c.test_prepare import compile_model, draw_rows, list_steps, make_model
from tests.exporting.c.test_source import EXAMPLES
from tests.exporting.onnx.test_graphs import models, signatures
from tests.exporting.random_models import RandomRun, make_signature

pytestmark = needs_compiler
LARGEST = {"float32": 3e38, "float64": 1e308}
NOT_FINITE = (np.nan, np.inf, -np.inf)
FILTERS = [
    {"kind": "ema", "rows": 4},
    {"kind": "moving_average", "rows": 3},
    {"kind": "butterworth", "rows": 6, "order": 3},
    {"kind": "savgol", "rows": 5, "order": 2},
]
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **EXAMPLES,
    "layer norm": ({"kind": "lstm", "hidden": [5, 4], "layer_norm": True}, {}),
    "tcn": ({"kind": "tcn", "hidden": 6, "layers": 3}, {"static": ("s",)}),
    "tcn of classes": (
        {"kind": "tcn", "hidden": 5, "layers": 1},
        {"classes": ("x", "y"), "targets": ("d",), "shared": 0},
    ),
    "tcn of limits": ({"kind": "tcn", "hidden": 5, "layers": 2, "output_range": [-2, 9]}, {}),
    "normalized": ({"kind": "gru", "hidden": [5], "normalize": "window"}, {"future": ("a",)}),
    **{
        f"mlp of {one}": ({"kind": "mlp", "hidden": [5, 4], "activation": one}, {})
        for one in ("relu", "silu", "elu", "leaky_relu", "tanh")
    },
}


def draw_inputs(run: RandomRun, count: int, length: int, seed: int = 0) -> list[Any]:
    """Windows, and what the model reads beside them."""
    interface = make_interface(run.portable)
    return list(to_inputs(run.draw_windows(count, length, seed), interface.dtype).values())


def list_bad_rows(run: RandomRun) -> list[Any]:
    """Rows with a value that is not finite, or as large as numbers can be."""
    interface = make_interface(run.portable)
    good = draw_inputs(run, 1, interface.context)[0][0, 0]
    largest = LARGEST[interface.dtype]
    sizes = [largest, -largest, largest * 1e-3, 1e30, -1e25, 1e19]
    result = []
    for place, value in itertools.product(range(len(good)), (*NOT_FINITE, *sizes)):
        row = good.copy()
        row[place] = value
        result.append(row)
    result += [np.full_like(good, one) for one in sizes]
    result += [np.resize([one, -one], len(good)).astype(good.dtype) for one in sizes]
    return result


@np.errstate(over="ignore")
def check_windows(run: RandomRun, library: CLibrary) -> None:
    """A window with a bad row, or something bad beside it, is an error or has a prediction."""
    interface = make_interface(run.portable)
    good = draw_inputs(run, 1, interface.context)
    for bad, place in itertools.product(list_bad_rows(run), (0, interface.context - 1)):
        inputs = [one.copy() for one in good]
        inputs[0][0, place] = bad
        out, codes = library.window(*inputs)
        assert codes[0] in (0, 1)
        assert np.isfinite(out).all() if codes[0] else np.isnan(out).all()
        if not np.isfinite(bad).all():
            assert codes[0] == 0
    for place, value in itertools.product(range(1, len(good)), NOT_FINITE):
        inputs = [one.copy() for one in good]
        inputs[place][0].flat[0] = value
        out, codes = library.window(*inputs)
        assert codes[0] == 0
        assert np.isnan(out).all()
        library.reset()
        assert not push(library, inputs, reset=True)[1].any()
    assert library.window(*good)[1].tolist() == [1]


@np.errstate(over="ignore")
def check_steps(run: RandomRun, library: CLibrary) -> None:
    """A bad row is an error or has a prediction; one context later, everything is as ever."""
    context = make_interface(run.portable).context
    before, after = (draw_inputs(run, 1, context, seed) for seed in (1, 2))
    alone, codes = push(library, after, reset=True)
    assert codes.tolist() == [0] * (context - 1) + [1]
    for bad, place in itertools.product(list_bad_rows(run), (0, 1, context)):
        wanted = alone
        library.reset()
        push(library, [before[0][:, :place], *before[1:]])
        out, (code,) = push(library, [bad[None, None], *before[1:]])
        if code:
            assert np.isfinite(out).all()
        if not np.isfinite(bad).all():
            assert code == 0
            continue  # it is ignored: another test
        out, codes = push(library, after)
        assert np.isfinite(out[codes == 1]).all()
        assert codes[-1] == 1
        if not code and place == context:
            scaled = [run._scale(bad[i], name) for i, name in enumerate(run.signature.inputs)]
            if not np.isfinite(scaled).all():  # ignored, too
                push(library, before, reset=True)
                wanted = push(library, after)[0]
            np.testing.assert_allclose(out[-1], wanted[-1], rtol=1e-5, atol=1e-5)


def push(library: CLibrary, inputs: list[Any], *, reset: bool = False) -> Any:
    """Pass the rows of one window to the step."""
    if reset:
        library.reset()
    rows, *extra = inputs
    return library.step(rows[0], *(one[[0] * rows.shape[1]] for one in extra))


@pytest.mark.parametrize("int8", [False, slow(True)])
@pytest.mark.parametrize("state", [True, slow(False)])
@pytest.mark.parametrize("name", MORE)
def test_no_prediction_is_infinite_or_nan(name, state, int8):
    model, fields = MORE[name]
    run = RandomRun(model, make_signature(**fields), count=1 + ("classes" in fields))
    library, _ = compile_run(run, carried=state, int8=int8)
    check_windows(run, library)
    check_steps(run, library)


@pytest.mark.parametrize("offset", [3.0, 1e7])
@pytest.mark.parametrize("how", FILTERS, ids=lambda how: how["kind"])
@pytest.mark.parametrize("name", ["lstm", slow("tcn"), slow("linear"), slow("both directions")])
def test_filters_recover(name, how, offset):
    model, fields = MORE[name]
    sections = {"predict": {"filter": how}, "data": {"missing": "forward"}}
    run = RandomRun(model, make_signature(**fields), offset=offset, sections=sections)
    library, _ = compile_run(run)
    check_steps_of_held_values(run, library)


def check_steps_of_held_values(run: RandomRun, library: CLibrary) -> None:
    """With data.missing = "forward", NaN is the last known value, and no bad value is held."""
    context = make_interface(run.portable).context
    good = draw_inputs(run, 1, 2 * context)
    for bad in list_bad_rows(run):
        push(library, good, reset=True)
        out, (code,) = push(library, [bad[None, None], *good[1:]])
        assert np.isfinite(out).all() or not code
        if np.isinf(bad).any():
            assert code == 0
        out, codes = push(library, good)
        assert np.isfinite(out[codes == 1]).all()
        assert codes[-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
@settings(max_examples=15)
@given(data=st.data())
def test_no_prediction_of_any_model_is_infinite_or_nan(kind, data):
    model, signature = data.draw(models(kind)), data.draw(signatures())
    offset = data.draw(st.sampled_from([0.0, 3.0, 1e7]))
    count, state = data.draw(st.sampled_from([1, 2])), data.draw(st.booleans())
    run = RandomRun(model, signature, count=count, offset=offset)
    library, _ = compile_run(run, carried=state)
    check_windows(run, library)
    check_steps(run, library)


def test_rows_that_are_not_finite_are_as_if_they_had_not_come():
    for name in ("lstm", "tcn", "mlp", "nhits"):
        model, fields = MORE[name]
        run = RandomRun(model, make_signature(**fields))
        library, _ = compile_run(run)
        context = make_interface(run.portable).context
        good = draw_inputs(run, 1, 2 * context)
        wanted, codes = push(library, good, reset=True)
        for bad in list_bad_rows(run):
            if np.isfinite(bad).all():
                continue
            holes = [np.insert(good[0], [3, context + 2], bad, axis=1), *good[1:]]
            out, found = push(library, holes, reset=True)
            kept = np.delete(np.arange(len(found)), [3, context + 3])
            assert found[kept].tolist() == codes.tolist()
            np.testing.assert_array_equal(out[kept][codes == 1], wanted[codes == 1])


def test_steps_of_preparation_recover():
    """From infinity, and from numbers as large as they can be."""
    steps, names = list_steps()
    model = make_model(steps, tuple(names))
    library, layout = compile_model(model)
    rows = draw_rows(200)
    raw = np.stack([rows[name] for name in layout.prepared.columns], axis=1)
    num, state_bytes = len(names), layout.sizes.state_bytes
    for value in (np.inf, -np.inf, 1e308, -1e308):
        bad = raw.copy()
        bad[[5, 6, 8]] = value
        found = library.prepare(bad, num, state_bytes=state_bytes)
        missing = np.isnan(library.prepare(raw, num, state_bytes=state_bytes)[-20:])
        assert not np.isinf(found[-20:]).any()
        assert np.array_equal(np.isnan(found[-20:]), missing)
        library.reset()
        out, codes = library.step(bad)
        assert np.isfinite(out[codes == 1]).all()
        if np.isfinite(value):  # a sum or a slow filter goes on to hold it
            library.reset()
            out, codes = library.step(raw)
        assert codes[-1] == 1
