"""Where a table begins: lines above the names, units below them, names over two rows."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.data.layout import find_layout


def split(text, delimiter=","):
    return [line.split(delimiter) if line else [] for line in text.split("\n")]


@pytest.mark.parametrize(
    ("text", "names", "name_row", "value_row"),
    [
        ("a,b\n1,2\n3,4", ["a", "b"], 0, 1),
        ("Cell tester 5000\na,b\n1,2\n3,4", ["a", "b"], 1, 2),
        ("Tester,5000\nCell,A7,new\n\na,b,c,d\n1,2,3,4\n3,4,5,6", ["a", "b", "c", "d"], 3, 4),
        ("Tester,,,\nCell,A7,,\n,,,\na,b,c,d\n1,2,3,4\n3,4,5,6", ["a", "b", "c", "d"], 3, 4),
        ("# made by x, y, and z\n# 2024\na,b\n1,2\n3,4", ["a", "b"], 2, 3),
        ("a,b,\n1,2,\n3,4,", ["a", "b", ""], 0, 1),
        ("a,b\n1,2,\n3,4,", ["a", "b", ""], 0, 1),
        ("a,b,\n1,2\n3,4", ["a", "b"], 0, 1),
        (",a,b\n0,1,2\n1,3,4", ["", "a", "b"], 0, 1),
        ("a\n1\n2", ["a"], 0, 1),
        ("x,kind\np,q\nr,s", ["x", "kind"], 0, 1),
    ],
)
def test_the_names_are_the_row_above_the_values(text, names, name_row, value_row):
    layout = find_layout(split(text))
    assert (layout.names, layout.first_name_row) == (names, name_row)
    assert layout.first_value_row == value_row
    assert layout.units == {}


def test_rows_above_the_names_that_may_be_values_are_not_passed_over():
    assert find_layout(split("1,2\na,b\n3,4\n5,6")).first_name_row == 0
    assert find_layout(split("1,2,3\na,b\n3,4\n5,6")).first_name_row == 0


@pytest.mark.parametrize(
    ("row", "units"),
    [
        ("s,V,mA", {"t": "s", "u": "V", "i": "mA"}),
        ("[s],(V),[mA/cm^2]", {"t": "s", "u": "V", "i": "mA/cm^2"}),
        ("s,V,", {"t": "s", "u": "V"}),
        ("s,°C,-", {"t": "s", "u": "°C"}),
        ("s,V,widgets", {"t": "s", "u": "V", "i": "widgets"}),
        ("1,V,A", None),
        ("s,NA,NA", None),
        ("low,high,odd", None),
        ("-,-,-", None),
        ("--,,", None),
    ],
)
def test_a_row_of_units_is_told_from_values(row, units):
    layout = find_layout(split(f"t,u,i\n{row}\n0,1,2\n1,2,3"))
    assert layout.units == (units or {})
    assert layout.first_value_row == (1 if units is None else 2)


def test_units_stand_beside_dates_and_text():
    layout = find_layout(split("date,u,note\nyyyy-mm-dd,V,\n2024-01-01,1,x\n2024-01-02,2,y"))
    assert layout.units == {"u": "V"}
    layout = find_layout(split("date,u,note\n2024-01-01,V,\n2024-01-02,1,x\n2024-01-03,2,y"))
    assert layout.units == {}  # a value that is wrong


def test_merged_names_are_joined():
    rows = split("t,U,,I,\n,min,max,min,max\ns,V,V,A,A\n0,1,2,3,4\n1,1,2,3,4")
    layout = find_layout(rows)
    assert layout.names == ["t", "U min", "U max", "I min", "I max"]
    assert layout.units == {"t": "s", "U min": "V", "U max": "V", "I min": "A", "I max": "A"}
    assert layout.first_value_row == 3
    with_title = find_layout(split("Run 7,,,,") + rows)
    assert with_title.names == layout.names


@given(st.lists(st.lists(st.sampled_from(["", "a", "b", "1", "2.5", "V"]), max_size=4), max_size=6))
def test_any_rows_have_a_layout_or_are_blank(rows):
    layout = find_layout(rows)
    if layout is None:
        assert not any(cell for row in rows for cell in row)
    else:
        assert 0 <= layout.first_name_row < layout.first_value_row <= len(rows)


CELLS = st.sampled_from(["", "1", "-2.5", "1,5", "x", "low", "NA", "2024-01-01", "b c", "7e3"])


@example([["x"], ["x"], ["1"]])
@example([[""], ["x"], ["1"]])
@example([[""], ["x"], ["x"], ["1"]])
@example([["", ""], ["x", "low"], ["1", ""]])
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n))))
def test_names_in_the_first_row_are_never_passed_over(rows):
    names = ["time", "u", "i", "note"][: len(rows[0]) if rows else 2]
    layout = find_layout([names, *rows])
    assert layout.names[: len(names)] == names
    assert layout.first_name_row == 0
    assert layout.first_value_row == 1  # none of these cells is a unit
