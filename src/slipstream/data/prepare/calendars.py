"""Hour, weekday, day of the year, month and holidays of timestamps.

All of these features follow from a row's own time stamp, so they are known for future rows.
"""

import datetime as dt
import zoneinfo
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.base.text import find_nearest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Times = npt.NDArray[Any]
Feature = Literal["hour", "weekday", "day_of_year", "month", "holiday"]

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000
QUARTER_US = 900_000_000
MINUTE_US = 60_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
THURSDAY = 3
"""The weekday of 1 January 1970, counted from Monday"""


def compute_calendar(
    times: Times,
    features: Sequence[str],
    *,
    holidays: Iterable[str | dt.date] = (),
    country: str | None = None,
    zone: str | None = None,
) -> dict[str, Floats]:
    """Return the columns of the features: `hour` gives hour_sin and hour_cos, `holiday` one column.

    The hour has its fraction, so 18:30 lies between 18:00 and 19:00; the day of the year and the
    month are whole and begin at 0. A holiday, one of these dates or a public holiday of the
    `country`, is 1, another day 0. With a `zone`, such as "Europe/Berlin", the times are read as
    UTC and the features are those of the local clock.
    """
    local = convert_to_local(times, zone)
    dates = parse_dates(holidays)
    columns: dict[str, Floats] = {}
    for name in features:
        if name == "holiday":
            if not dates and country is None:
                raise UserError('the feature "holiday" needs the dates: set holidays or country')
            days = local // DAY_US
            marked = np.array(dates, dtype="datetime64[D]").astype(np.int64)
            if country is not None and len(days):
                marked = np.append(marked, list_public_holidays(country, days.min(), days.max()))
            columns[name] = np.isin(days, marked).astype(np.float64)
        else:
            angle = _compute_turns(local, name) * (2 * np.pi)
            columns |= {f"{name}_sin": np.sin(angle), f"{name}_cos": np.cos(angle)}
    return columns


def check_country(country: str) -> None:
    """Refuse a country or region whose public holidays are not known."""
    _make_calendar(country, [2000])


def list_public_holidays(country: str, first: int, last: int) -> Ints:
    """Return the public holidays of the years from a day to another, as days since 1970."""
    years = (
        np.array([first, last], dtype="datetime64[D]").astype("datetime64[Y]").astype(int) + 1970
    )
    calendar = _make_calendar(country, range(int(years[0]), int(years[1]) + 1))
    return np.array(sorted(calendar), dtype="datetime64[D]").astype(np.int64)


def _make_calendar(country: str, years: Iterable[int]) -> Any:
    """Return the public holidays of a country, such as "DE", or of its region, such as "DE-BY"."""
    try:
        import holidays
    except ModuleNotFoundError:
        raise UserError(
            f'the public holidays of country = "{country}" need the package holidays: pip install '
            '"slipstream[holidays]"; or list the dates in holidays'
        ) from None
    code, _, region = country.partition("-")
    known = holidays.list_supported_countries()
    if code not in known:
        nearest = find_nearest(code, known)
        hint = f'did you mean "{nearest}"?' if nearest else 'write it as in "DE" or "DE-BY"'
        raise UserError(f'there are no public holidays of the country "{code}"; {hint}')
    if region and region not in known[code]:
        listed = ", ".join(f"{code}-{name}" for name in known[code]) or "none"
        raise UserError(f'there is no region "{region}" of "{code}"; its regions: {listed}')
    return holidays.country_holidays(code, subdiv=region or None, years=years)


def name_columns(features: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the columns that `compute_calendar` makes."""
    pairs = ((name,) if name == "holiday" else (f"{name}_sin", f"{name}_cos") for name in features)
    return tuple(name for pair in pairs for name in pair)


def convert_to_local(times: Times | None, zone: str | None) -> Ints:
    """Return timestamps as microseconds of the local clock; plain numbers have no calendar."""
    if times is None or times.dtype != np.int64:
        holds = "has no times" if times is None else "holds plain numbers, not dates"
        raise UserError(
            f"data.time {holds}; the calendar needs dates or timestamps", setting="data.time"
        )
    if zone is None:
        return times
    check_zone(zone)
    clock = zoneinfo.ZoneInfo(zone)
    quarters = times // QUARTER_US  # clocks change at quarters of an hour only
    begins = np.flatnonzero(np.diff(quarters, prepend=quarters[:1] - 1))
    moments = (EPOCH + dt.timedelta(minutes=15 * int(quarter)) for quarter in quarters[begins])
    offsets = [moment.astimezone(clock).utcoffset() or dt.timedelta() for moment in moments]
    shifts = np.array(
        [offset // dt.timedelta(microseconds=1) for offset in offsets], dtype=np.int64
    )
    return times + np.repeat(shifts, np.diff(begins, append=len(times)))


def check_zone(zone: str) -> None:
    """Refuse the name of a time zone that does not exist."""
    try:
        zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        nearest = find_nearest(zone, zoneinfo.available_timezones())
        hint = f'did you mean "{nearest}"?' if nearest else 'write one such as "Europe/Berlin"'
        raise UserError(f'there is no time zone "{zone}"; {hint}') from None


def parse_dates(dates: Iterable[str | dt.date]) -> list[dt.date]:
    """Return the dates of a list of texts such as "2026-12-25"."""
    result = []
    for date in dates:
        try:
            result.append(dt.date.fromisoformat(date) if isinstance(date, str) else date)
        except ValueError:
            raise UserError(f'"{date}" is not a date; write it as in "2026-12-25"') from None
    return result


def compute_hour(local: Ints) -> Floats:
    """Return the whole hour of the day, 0 to 23."""
    return (local % DAY_US // HOUR_US).astype(np.float64)


def compute_minute(local: Ints) -> Floats:
    """Return the whole minute of the hour, 0 to 59."""
    return (local % HOUR_US // MINUTE_US).astype(np.float64)


def compute_weekday(local: Ints) -> Floats:
    """Return the day of the week: 0 for Monday to 6 for Sunday."""
    return ((local // DAY_US + THURSDAY) % 7).astype(np.float64)


def compute_day_of_year(local: Ints) -> Floats:
    """Return the day of the year: 1 for 1 January to 365 or 366."""
    days = (local // DAY_US).astype("datetime64[D]")
    first = days.astype("datetime64[Y]").astype("datetime64[D]")
    return (days.astype(np.int64) - first.astype(np.int64) + 1).astype(np.float64)


def compute_month(local: Ints) -> Floats:
    """Return the month, 1 to 12."""
    months = (local // DAY_US).astype("datetime64[D]").astype("datetime64[M]")
    return (months.astype(np.int64) % 12 + 1).astype(np.float64)


def _compute_turns(local: Ints, feature: str) -> Floats:
    """Return the position of each time in the period of a feature, from 0 to 1."""
    match feature:
        case "hour":
            return (local % DAY_US) / DAY_US
        case "weekday":
            return compute_weekday(local) / 7
        case "day_of_year":
            return (compute_day_of_year(local) - 1) / 366
        case "month":
            return (compute_month(local) - 1) / 12
    raise UserError(
        f'there is no calendar feature "{feature}"; use hour, weekday, day_of_year, month or '
        "holiday"
    )
