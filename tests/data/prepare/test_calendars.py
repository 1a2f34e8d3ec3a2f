"""The calendar compared with Python's own dates."""

from __future__ import annotations

import datetime as dt
import math
import sys
import zoneinfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream
from slipstream.base.errors import UserError
from slipstream.data.prepare import calendars
from slipstream.data.prepare.calendars import check_country, compute_calendar, name_columns
from tests.conftest import small_config

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


def hours_of(*days):
    """Return noon of some days, in microseconds."""
    return np.array([np.datetime64(f"{day}T12:00", "us").astype(np.int64) for day in days])


def test_public_holidays_are_those_of_the_country_and_its_region():
    pytest.importorskip("holidays", reason="needs slipstream[holidays]")
    # Unity Day, Epiphany (Bavaria only), an ordinary day, Good Friday
    times = hours_of("2026-10-03", "2026-01-06", "2026-06-30", "2027-03-26")
    germany = compute_calendar(times, ["holiday"], country="DE")["holiday"]
    assert germany.tolist() == [1, 0, 0, 1]
    assert compute_calendar(times, ["holiday"], country="DE-BY")["holiday"].tolist() == [1, 1, 0, 1]
    own = compute_calendar(times, ["holiday"], country="DE", holidays=["2026-06-30"])["holiday"]
    assert own.tolist() == [1, 0, 1, 1]


def test_a_public_holiday_is_a_day_of_the_local_clock():
    pytest.importorskip("holidays", reason="needs slipstream[holidays]")
    late = hours_of("2026-10-02") + 10 * 3_600_000_000 + 1  # 22:00 in UTC, midnight in Berlin
    assert compute_calendar(late, ["holiday"], country="DE")["holiday"].tolist() == [0]
    local = compute_calendar(late, ["holiday"], country="DE", zone="Europe/Berlin")
    assert local["holiday"].tolist() == [1]


@pytest.mark.parametrize(
    ("country", "message"),
    [
        ("DEU1", "no public holidays of the country"),
        ("DE-XX", r'no region "XX" of "DE"; its regions: .*DE-BY'),
    ],
)
def test_an_unknown_country_or_region_is_refused(country, message):
    pytest.importorskip("holidays", reason="needs slipstream[holidays]")
    with pytest.raises(UserError, match=message):
        check_country(country)


def test_without_the_package_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "holidays", None)
    with pytest.raises(UserError, match=r'pip install "slipstream\[holidays\]"; or list the dates'):
        check_country("DE")


def test_a_run_with_public_holidays_trains_streams_and_is_refused_in_c(tmp_path):
    pytest.importorskip("holidays", reason="needs slipstream[holidays]")
    days = np.arange("2024-01-01", "2025-06-01", dtype="datetime64[D]")
    value = np.sin(np.arange(len(days)) / 7)
    path = tmp_path / "days.csv"
    rows = "".join(f"{day},{number:.4f}\n" for day, number in zip(days, value, strict=True))
    path.write_text("day,y\n" + rows)
    step = {"step": "calendar", "country": "DE"}
    data = {"path": str(path), "time": "day", "targets": ["y"], "prepare": [step]}
    run = slipstream.train(small_config(tmp_path, data=data, train={"epochs": 1}), quiet=True).run
    stream = slipstream.Stream(run)
    pushed = [stream.push({"day": str(d), "y": v}) for d, v in zip(days, value, strict=True)]
    predicted = slipstream.predict(run, path).to_pydict()["y_predicted"]
    assert pushed[-1].point[:, 0] == pytest.approx(predicted, rel=1e-4, abs=1e-5)
    with pytest.raises(UserError, match=r"step 1 \(calendar\).*needs the time of each row"):
        slipstream.export(run, to="c", out=tmp_path / "c")
