"""The kernels compiled for cards that are not here: what they need is what the cards have."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
