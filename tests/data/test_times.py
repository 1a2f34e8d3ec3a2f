from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data import columns
from slipstream.data.columns import parse_times
from slipstream.data.table import read_memory


def parse(cell: str, time_format: str) -> object:
    parsed, wrong = parse_times(pa.chunked_array([[cell]]), time_format)
    return wrong if wrong is not None else parsed[0].as_py()


@pytest.mark.parametrize(
    ("cell", "time_format", "microsecond"),
    [
        ("01.02.2020 12:13:14.25", "%d.%m.%Y %H:%M:%S.%f", 250_000),
        ("2020-02-01T12:13:14,000001", "%Y-%m-%dT%H:%M:%S,%f", 1),
        ("12:13:14.123456789 2020/02/01", "%T.%f %Y/%m/%d", 123_456),
        ("20200201121314500", "%Y%m%d%H%M%S%f", 500_000),
        ("Feb 1 2020 12:13:14.5 PM", "%b %d %Y %I:%M:%S.%f %p", 500_000),
    ],
)
def test_fractions_of_a_second_are_read(cell, time_format, microsecond):
    assert parse(cell, time_format) == datetime(2020, 2, 1, 12, 13, 14, microsecond)


def test_fractions_go_with_a_zone():
    found = parse("2020-02-01 12:13:14.5+0200", "%Y-%m-%d %H:%M:%S.%f%z")
    assert found == datetime(2020, 2, 1, 10, 13, 14, 500_000, tzinfo=UTC)


@pytest.mark.parametrize("cell", ["01.02.2020 12:13:14", "01.02.2020 12:13:14.x", "", "1.5"])
def test_a_time_without_the_fraction_is_refused(cell):
    expected = 'does not match data.time_format = "%d.%m.%Y %H:%M:%S.%f"'
    assert parse(cell, "%d.%m.%Y %H:%M:%S.%f") == expected


@given(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)))
def test_times_are_those_that_python_reads(moment):
    for time_format in ("%Y-%m-%d %H:%M:%S.%f", "%d/%m/%Y %I:%M:%S.%f %p", "%j|%Y|%f|%H%M%S"):
        assert parse(moment.strftime(time_format), time_format) == moment


@pytest.mark.parametrize(
    ("cells", "formats"),
    [
        (["2012/01/01", "2012/01/31"], ["%Y/%m/%d"]),
        (["2010/01/01 00:00:00", "2010/01/01 01:00:00"], ["%Y/%m/%d %H:%M:%S"]),
        (["Jan 1 2000", "Feb 1 2000"], ["%b %d %Y"]),
        (["1991 Jul", "1991 Aug"], ["%Y %b"]),
        (["1970 Q1", "1970 Q4"], ["%Y Q%q"]),
        (["1970Q1", "1970Q4"], ["%Y Q%q"]),
        (["Q3-1970", "Q4-1970"], ["Q%q-%Y"]),
        (["01/02/2020", "03/04/2020"], ["%d/%m/%Y", "%m/%d/%Y"]),
        (["01/02/2020", "13/04/2020"], ["%d/%m/%Y"]),
        (["01.02.20 10:00"], ["%d.%m.%y %H:%M"]),
    ],
)
def test_the_format_that_every_cell_has_is_suggested(cells, formats):
    _, wrong = parse_times(pa.chunked_array([cells]), None)
    assert wrong is not None
    assert wrong.endswith("data.time_format = " + " or ".join(f'"{one}"' for one in formats))
    for time_format in formats:
        assert parse_times(pa.chunked_array([cells]), time_format)[1] is None


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["00:00:00", "00:01:00.5", "25:19:08.386"], [0, 60.5, 91148.386]),
        ([" 0d 00:00:01.00", "1d 01:00:00"], [1, 90000]),
        (["9:59:59", "10:00:00"], [35999, 36000]),
    ],
)
def test_times_since_a_start_are_seconds(cells, wanted):
    got = columns.read_times(read_memory({"t": cells}), "t", None)
    assert got.dtype == np.float64
    assert got.tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("cell", ["12:60:00", "12:00", "-1:00:00", "", "12:00:00 PM"])
def test_other_texts_with_colons_are_no_times_since_a_start(cell):
    with pytest.raises(UserError, match=r'row 2, column "t"'):
        columns.read_times(read_memory({"t": ["00:00:00", cell]}), "t", None)


def test_quarters_are_their_first_months():
    text = pa.chunked_array([["1970 Q1", "1970 Q2", "1999 Q4"]])
    parsed, wrong = parse_times(text, "%Y Q%q")
    assert wrong is None
    months = [(moment.year, moment.month, moment.day) for moment in parsed.to_pylist()]
    assert months == [(1970, 1, 1), (1970, 4, 1), (1999, 10, 1)]


@pytest.mark.parametrize("cell", ["1970 Q5", "1970 Q11", "1970 04", "1970"])
def test_what_is_no_quarter_is_refused(cell):
    bad, wrong = parse_times(pa.chunked_array([["1970 Q1", cell]]), "%Y Q%q")
    assert bad == 1
    assert "%Y Q%q" in wrong
