from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text import escape_controls, escape_to_line


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
