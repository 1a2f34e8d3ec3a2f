from __future__ import annotations

import pytest

from slipstream.reporting.formatting import format_number, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567.0, "1,234,567"),
        (12.3456, "12.35"),
        (0.0123456, "0.01235"),
        (-3.0, "-3.000"),
        (0.0, "0"),
        (None, "–"),
        (float("nan"), "–"),
        (1e-12, "0.00000000"),
    ],
)
def test_numbers_have_four_figures(value, text):
    assert format_number(value) == text


def test_durations():
    assert [format_seconds(s) for s in (1.25, 59.97, 75, 3 * 3600 + 120)] == [
        "1.2 s",
        "1 min 0 s",
        "1 min 15 s",
        "3 h 2 min",
    ]
