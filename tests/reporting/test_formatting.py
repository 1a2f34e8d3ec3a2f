from __future__ import annotations

import pytest

from slipstream.base.text import format_number
from slipstream.reporting.wording import find_unit, format_moment, format_seconds, format_step


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


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("soc_percent", "%"),
        ("voltage_V", "V"),
        ("cell_current_A", "A"),
        ("class_A", ""),
        ("A", ""),
        ("oil temperature (°C)", "°C"),
        ("load [kW] ", "kW"),
        ("OT", ""),
        ("pm2.5", ""),
    ],
)
def test_units_come_from_names(name, unit):
    assert find_unit(name) == unit


def test_times_and_steps_read_as_such():
    day = 86400 * 1e6
    assert format_moment(17 * day, True) == "1970-01-18"
    assert format_moment(-1.5 * day, True) == "1969-12-30 12:00:00"
    assert format_moment(1234.5, False) == "1,234.5"
    assert [format_step(s, True) for s in (60, 7200, 86400, 0.5)] == [
        "1 minute",
        "2 hours",
        "1 day",
        "0.5 s",
    ]
    assert [format_step(days * 86400, True) for days in (7, 28, 30, 31, 90, 92, 365, 366)] == [
        "7 days",
        "28 days",
        *["1 month"] * 2,
        *["1 quarter"] * 2,
        *["1 year"] * 2,
    ]
    assert format_step(5.0, False) == "5"
