"""The C code computes what PyTorch computes, whatever the model."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.base.text import format_c_double
from slipstream.config.model import SPECS
from slipstream.exporting.c.files import FLAGS, make_runner
from slipstream.exporting.formats import make_interface
from slipstream.exporting.verification import Differences
from slipstream.models.c_code import quantize, to_blocks
from tests.exporting.c.programs import (
    compare_windows,
    compile_run,
    needs_compiler,
    run_steps,
    write_source,
)
from tests.exporting.onnx.test_graphs import models, signatures
from tests.exporting.random_models import RandomRun, make_nearly_constant, make_signature

LIMIT = 1e-5
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lstm": ({"kind": "lstm", "hidden": [9, 16]}, {"static": ("s", "t")}),
    "gru": ({"kind": "gru", "hidden": [9, 5], "layer_norm": True}, {"horizon": 0}),
    "both directions": (
        {"kind": "lstm", "hidden": [5, 9], "bidirectional": True, "normalize": "window"},
        {"classes": (), "quantiles": (0.1, 0.5, 0.9)},
    ),
    "attention": (
        {"kind": "gru", "hidden": [6], "bidirectional": True, "pool": "attention"},
        {"classes": ("low", "mid", "high"), "targets": ("d",), "shared": 0},
    ),
    "flatten": (
        {"kind": "tcn", "hidden": 6, "layers": 2, "pool": "flatten", "patch": 2},
        {"future": ("a",), "static": ("s",)},
    ),
    "mean": ({"kind": "tcn", "hidden": 12, "layers": 4, "pool": "mean"}, {}),
    "mlp": ({"kind": "mlp", "hidden": [9, 4, 6], "activation": "gelu"}, {"future": ("a", "b")}),
    "nhits": (
        {"kind": "nhits", "hidden": [9, 4], "activation": "silu", "normalize": "last"},
        {"future": ("a",), "static": ("s",), "context": 37, "horizon": 21},
    ),
    "nhits of channels": (
        {"kind": "nhits", "hidden": [9], "stacks": 2},
        {"channels": "independent", "targets": ("b", "c"), "shared": 2, "context": 9},
    ),
    "transformer": (
        {"kind": "transformer", "hidden": 12, "heads": 3, "normalize": "window", "patch": 2},
        {"future": ("a",), "static": ("s",)},
    ),
    "transformer of sines": (
        {"kind": "transformer", "hidden": 8, "layers": 1, "positions": "sinusoidal"},
        {"classes": ("low", "mid", "high"), "targets": ("d",), "shared": 0},
    ),
    "linear": (
        {"kind": "linear", "normalize": "last", "output_range": [-1.0, 2.0]},
        {"channels": "independent", "targets": ("b", "c"), "shared": 2, "future": ("a",)},
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", EXAMPLES)
def test_windows_and_single_rows_give_what_the_model_predicts(name):
    model, fields = EXAMPLES[name]
    run = RandomRun(model, make_signature(**fields), count=1 + ("classes" in fields))
    library, layout = compile_run(run)
    assert compare_windows(run, library) <= LIMIT
    assert compare_windows(run, library, steps=True) <= LIMIT
    assert layout.parts.carried == (name in ("lstm", "gru"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
@settings(max_examples=15)
@given(data=st.data())
def test_every_model_that_training_accepts_gives_the_same_in_c(kind, data):
    model, signature = data.draw(models(kind)), data.draw(signatures())
    offset = data.draw(st.sampled_from([0.0, 3.0, 1e7]))
    if offset < 1e7 and data.draw(st.booleans()):
        model["output_range"] = [-2.0, 2.5]
    levels = ("80", "95") if not signature.classes and data.draw(st.booleans()) else ()
    count = data.draw(st.sampled_from([1, 1, 3]))
    run = RandomRun(model, signature, count=count, offset=offset, levels=levels)
    library, _ = compile_run(run, carried=data.draw(st.booleans()))
    assert compare_windows(run, library) <= LIMIT
    assert compare_windows(run, library, steps=True) <= LIMIT


@needs_compiler
@pytest.mark.parametrize(
    "model",
    [{"kind": "lstm", "hidden": [8, 5]}, {"kind": "tcn", "hidden": 6, "layers": 3}],
    ids=lambda model: model["kind"],
)
def test_300_carried_steps_equal_one_pass(model):
    signature = make_signature(channels="independent", targets=("b", "c"), shared=2)
    run = RandomRun(model, signature, count=2)
    library, layout = compile_run(run)
    assert layout.parts.carried
    windows = run.draw_windows(1, 300)
    out = run_steps(library, windows.rows[0])
    expected = run.predict(windows)["prediction"][0].ravel()
    np.testing.assert_allclose(out, expected, rtol=LIMIT, atol=LIMIT)


@needs_compiler
def test_a_ring_of_rows_predicts_the_last_window_of_a_long_series():
    run = RandomRun({"kind": "lstm", "hidden": [8], "normalize": "last"}, make_signature())
    library, _ = compile_run(run)
    rows = run.draw_windows(1, 29).rows
    windows = run.draw_windows(1, 8)._replace(rows=rows[:, -8:])
    expected = run.predict(windows)["prediction"][0].ravel()
    np.testing.assert_allclose(run_steps(library, rows[0]), expected, rtol=LIMIT, atol=LIMIT)


@needs_compiler
def test_a_step_says_when_a_context_is_complete_and_ignores_what_is_not_finite():
    run = RandomRun({"kind": "mlp", "hidden": [4]}, make_signature())
    library, _ = compile_run(run)
    rows = run.draw_windows(1, 9).rows[0]
    library.reset()
    complete = library.step(rows)[1]
    assert complete.tolist() == [0] * 7 + [1, 1]
    out = library.step(rows[:1])[0]
    library.reset()
    holes = np.insert(rows, [3, 8], np.nan, axis=0)
    holes[3, 1:] = 1.0
    complete = library.step(holes)[1]
    assert complete.tolist() == [0] * 8 + [1, 0, 1]
    np.testing.assert_array_equal(library.step(rows[:1])[0], out)


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shared", [0, 1])
def test_nearly_constant_windows_keep_their_digits(seed, shared):
    signature = make_signature(targets=("c",) if shared else ("d",), shared=shared, future=("a",))
    run = RandomRun({"kind": "linear", "normalize": "window"}, signature)
    interface = make_interface(run.portable)
    library, _ = compile_run(run)
    for spread in (1e-1, 1e-2, 1e-3):
        windows = run.draw_windows(7, 8, seed)
        windows = make_nearly_constant(windows._replace(rows=10 * windows.rows), spread)
        differences = Differences(interface, run.scaler)
        predicted = make_runner(library.predict, library, interface)(windows)
        differences.add(predicted, run.predict(windows, exact=True))
        assert differences.max_rel <= LIMIT


@needs_compiler
def test_several_series_have_states_of_their_own(tmp_path):
    run = RandomRun({"kind": "gru", "hidden": [4]}, make_signature(horizon=0))
    write_source(run, tmp_path, name="cell")
    rows = run.draw_windows(2, 8).rows.astype(np.float32)
    numbers = [", ".join(map(repr, one.ravel().tolist())) for one in rows]
    (tmp_path / "main.c").write_text(
        f"""
        #include "cell.h"
        static const float a[] = {{{numbers[0]}}}, b[] = {{{numbers[1]}}};
        int main(void) {{
            static cell_state one, two;
            float together[2], alone[1];
            int t;
            cell_reset_state(&one); cell_reset_state(&two); cell_reset();
            for (t = 0; t < 8; t++) {{
                cell_step_state(&one, a + 3 * t, together);
                cell_step_state(&two, b + 3 * t, together + 1);
            }}
            for (t = 0; t < 8; t++) cell_step(a + 3 * t, alone);
            if (alone[0] != together[0]) return 1;
            cell_window(b, alone); /* leaves all states as they are */
            cell_step_state(&one, a, together);
            cell_step(a, alone);
            return alone[0] != together[0];
        }}
        """
    )
    files = [tmp_path / "cell.c", tmp_path / "main.c", "-lm", "-o", tmp_path / "test"]
    subprocess.run(["cc", *FLAGS, *map(str, files)], check=True)
    subprocess.run([str(tmp_path / "test")], check=True)


@needs_compiler
def test_two_models_share_a_program(tmp_path):
    signature = make_signature()
    for name, kind in (("first", "lstm"), ("second", "tcn")):
        write_source(RandomRun({"kind": kind, "hidden": 4}, signature), tmp_path, name=name)
    (tmp_path / "main.c").write_text(
        '#include "first.h"\n#include "second.h"\n'
        "int main(void) { first_reset(); second_reset(); return 0; }\n"
    )
    files = [str(tmp_path / name) for name in ("first.c", "second.c", "main.c")]
    subprocess.run(["cc", *FLAGS, *files, "-lm", "-o", str(tmp_path / "both")], check=True)


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
@pytest.mark.parametrize("name", EXAMPLES)
def test_clang_has_no_warning(name, tmp_path):
    model, fields = EXAMPLES[name]
    write_source(RandomRun(model, make_signature(**fields)), tmp_path)
    subprocess.run(["clang", *FLAGS, "-c", "slip.c", "-o", "slip.o"], cwd=tmp_path, check=True)


@needs_compiler
def test_int8_matrices_are_within_half_a_step_of_each_row_and_a_quarter_as_large():
    run = RandomRun({"kind": "lstm", "hidden": [32]}, make_signature())
    exact, coarse = (compile_run(run, int8=int8) for int8 in (False, True))
    assert 1e-5 < compare_windows(run, coarse[0]) < 0.02
    assert coarse[1].sizes.flash_bytes < 0.35 * exact[1].sizes.flash_bytes
    matrix = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    values, scales = quantize(matrix)
    assert (np.abs(values * scales[:, None] - matrix) <= 0.501 * scales[:, None]).all()


@needs_compiler
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_header_states_the_bytes_that_the_compiler_counts(name, tmp_path: Path):
    model, fields = EXAMPLES[name]
    source = write_source(RandomRun(model, make_signature(**fields)), tmp_path)
    sizes = source.layout.sizes
    assert f"{sizes.state_bytes:,} for" in source.files["slip.h"].replace("\n * ", " ")
    (tmp_path / "check.c").write_text(
        '#include "slip.c"\n'
        f"typedef char state[sizeof(slip_state) == {sizes.state_bytes} ? 1 : -1];\n"
        f"typedef char shared[sizeof work == {sizes.scratch_bytes} ? 1 : -1];\n"
    )
    subprocess.run(["cc", "-std=c99", "-fsyntax-only", "check.c"], cwd=tmp_path, check=True)


def test_matrices_are_stored_in_blocks_of_rows_column_by_column():
    matrix = np.arange(30).reshape(10, 3)
    expected = [*itertools.chain(*(range(k, 24, 3) for k in range(3))), *range(24, 30)]
    assert to_blocks(matrix).tolist() == expected


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_written_exactly(value):
    text = format_c_double(value)
    assert (float.fromhex(text) if "x" in text else float(text)) == value


def test_code_is_written_without_torch():
    code = "import sys, slipstream.exporting.c.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
