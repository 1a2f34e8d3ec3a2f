from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.base.text import (
    escape_controls,
    escape_to_line,
    find_nearest,
    format_count,
    format_epoch,
    format_html_table,
    format_ms,
    format_table,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("power [kW] µ 温度 🙂", "power [kW] µ 温度 🙂"),
        ("a\nb\tc\r", "a\nb\\tc\\r"),
        ("\x00\x1b[2J\x7f\x9b", "\\x00\\x1b[2J\\x7f\\x9b"),
        ("abc\u202edef\u2028", "abc\\u202edef\\u2028"),
        ("caf\udce9.csv", "caf\\udce9.csv"),
        ("C:\\new", "C:\\new"),
    ],
)
def test_what_a_terminal_obeys_is_escaped_and_the_rest_stays(text, shown):
    assert escape_controls(text) == shown
    assert escape_to_line(text) == shown.replace("\n", "\\n")


@given(st.text())
def test_every_text_can_be_printed_and_encoded(text):
    found = escape_to_line(text)
    found.encode()
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in found)
    assert escape_controls(found) == found


def test_a_table_is_aligned():
    rows = [["model", "0.5"], ["ridge", "12.25"]]
    assert format_table("Result", ["", "MAE"], rows) == (
        "Result\n         MAE\nmodel    0.5\nridge  12.25"
    )


def test_a_table_escapes_names_for_a_terminal_and_a_page():
    rows = [["<b>\x1b", "1"]]
    assert format_table("a\nb", ["", "x"], rows) == "a\\nb\n         x\n<b>\\x1b  1"
    found = format_html_table("<i>", ["", "x"], rows)
    assert "<caption>&lt;i&gt;</caption>" in found
    assert "<td>&lt;b&gt;\\x1b</td><td>1</td>" in found


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (1290.3, "1,290 ms"),
        (323.4, "323 ms"),
        (7.013, "7.01 ms"),
        (0.2551, "0.255 ms"),
        (0.0, "0 ms"),
    ],
)
def test_milliseconds_have_three_figures_and_no_exponent(ms, text):
    assert format_ms(ms) == text


def test_nouns_follow_their_number():
    counts = [format_count(count, "thread") for count in (0, 1, 2, 1520)]
    assert counts == ["0 threads", "1 thread", "2 threads", "1,520 threads"]


def test_an_epoch_has_at_most_one_decimal():
    shown = [format_epoch(epoch) for epoch in (9, 9.0, 8.714285, 0.04, 1234.56)]
    assert shown == ["9", "9", "8.7", "0", "1,234.6"]


def test_a_name_is_suggested_whatever_its_case():
    assert find_nearest("ot", ["HUFL", "OT"]) == "OT"
    assert find_nearest("Volatge", ["voltage", "current"]) == "voltage"
    assert find_nearest("zzz", ["voltage", "current"]) is None
