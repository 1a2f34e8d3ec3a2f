"""The calendar compared with Python's own dates."""

from __future__ import annotations

import datetime as dt
import math
import zoneinfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.base.errors import UserError
from slipstream.data.prepare import calendars
from slipstream.data.prepare.calendars import compute_calendar, name_columns

FEATURES = ("hour", "weekday", "day_of_year", "month")
EPOCH = dt.datetime(1970, 1, 1)


def to_microseconds(moment):
    return (moment - EPOCH) // dt.timedelta(microseconds=1)


@settings(max_examples=60)
@given(
    moment=st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(2100, 1, 1)),
    zone=st.sampled_from([None, "Europe/Berlin", "America/St_Johns"]),
)
def test_features_agree_with_the_dates_of_python(moment, zone):
    times = np.array([to_microseconds(moment)])
    local = moment
    if zone is not None:
        utc = moment.replace(tzinfo=dt.UTC)
        local = utc.astimezone(zoneinfo.ZoneInfo(zone)).replace(tzinfo=None)
    midnight = dt.datetime.combine(local, dt.time())
    turns = {
        "hour": (local - midnight) / dt.timedelta(days=1),
        "weekday": local.weekday() / 7,
        "day_of_year": (local.timetuple().tm_yday - 1) / 366,
        "month": (local.month - 1) / 12,
    }
    columns = compute_calendar(times, FEATURES, zone=zone)
    assert tuple(columns) == name_columns(FEATURES)
    for name, turn in turns.items():
        assert columns[f"{name}_sin"][0] == pytest.approx(math.sin(2 * math.pi * turn), abs=1e-12)
        assert columns[f"{name}_cos"][0] == pytest.approx(math.cos(2 * math.pi * turn), abs=1e-12)
    if zone is None:
        assert calendars.compute_hour(times)[0] == moment.hour
        assert calendars.compute_minute(times)[0] == moment.minute
        assert calendars.compute_weekday(times)[0] == moment.weekday()
        assert calendars.compute_day_of_year(times)[0] == moment.timetuple().tm_yday
        assert calendars.compute_month(times)[0] == moment.month


def test_holidays_last_from_midnight_to_midnight_of_the_local_clock():
    hours = np.array([to_microseconds(dt.datetime(2026, 12, 24, hour)) for hour in (22, 23)])
    dates = ["2026-12-25", dt.date(2026, 12, 26)]
    columns = compute_calendar(hours, ["holiday"], holidays=dates, zone="Europe/Berlin")
    assert columns["holiday"].tolist() == [0.0, 1.0]  # 23:00 and 00:00 in Berlin
    assert compute_calendar(hours, ["holiday"], holidays=dates)["holiday"].tolist() == [0.0, 0.0]
    assert name_columns(["holiday", "month"]) == ("holiday", "month_sin", "month_cos")


def test_no_rows_have_no_features():
    columns = compute_calendar(np.arange(0), FEATURES, zone="Europe/Berlin")
    assert all(values.shape == (0,) for values in columns.values())


@pytest.mark.parametrize(
    ("times", "chosen", "message"),
    [
        (np.arange(3.0), {"features": ["hour"]}, "holds plain numbers, not dates"),
        (np.arange(3), {"features": ["houre"]}, 'no calendar feature "houre"'),
        (np.arange(3), {"features": ["holiday"]}, "set holidays"),
        (np.arange(3), {"features": [], "holidays": ["25.12.2026"]}, "is not a date"),
        (np.arange(3), {"features": ["hour"], "zone": "Europe/Berlinn"}, '"Europe/Berlin"'),
        (np.arange(3), {"features": ["hour"], "zone": "../etc/passwd"}, "no time zone"),
    ],
)
def test_what_has_no_calendar_is_refused(times, chosen, message):
    with pytest.raises(UserError, match=message):
        compute_calendar(times, **chosen)
