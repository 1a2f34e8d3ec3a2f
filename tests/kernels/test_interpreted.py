"""The Triton kernels on a CPU: a small set of shapes, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import slow

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("area", "drawn", "checks"),
    [
        slow("updates", 0, 29),
        slow("attention", 1, 12),
        slow("fused", 0, 16),
        slow("stepwise", 0, 16),
        slow("split", 0, 4),
        slow("attention", 12, 34),
        slow("stepwise", 3, 28),
        slow("split", 1, 10),
    ],
)
def test_the_kernels_compute_what_is_defined(area, drawn, checks):
    """A process for each area, so that the workers of the test run share them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", area, str(drawn)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == checks
    for name, error in errors.items():
        assert error < (2e-3 if "fp16" in name else 3e-6), name
