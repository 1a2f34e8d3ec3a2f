"""The Triton kernels on a CPU: a small set of shapes, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_the_kernels_compute_what_is_defined():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 20 + 2 + 12 + 34 + 28 + 10
    for name, error in errors.items():
        assert error < (2e-3 if "fp16" in name else 3e-6), name
