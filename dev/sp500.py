"""Makes the table behind examples/sp500-*.toml from daily bars of the S&P 500.

    python dev/sp500.py sp500_2000.csv sp500.csv

Reads date, high, low, close and volume. Each row of what it writes knows that day and those
before it: the logarithmic return, the day's range and the change of volume, in
per cent, and `day`, which counts trading days, so that weekends are no gaps. The label alone looks
ahead: `direction` says whether the close five trading days later is above the day's, and is empty
where that day is not known. A split must leave five days out before each test block (purge = 5).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

AHEAD = 5


def table(bars: pa.Table) -> pa.Table:
    """One row for each day but the first, which has no return."""
    high, low, close, volume = (
        np.log(bars.column(name).to_numpy().astype(np.float64))
        for name in ("high", "low", "close", "volume")
    )
    ahead = np.full(len(close), np.nan)
    ahead[:-AHEAD] = close[AHEAD:] - close[:-AHEAD]
    named = np.where(ahead > 0, "up", "down")
    columns = {
        "day": np.arange(len(close)),
        "date": bars.column("date"),
        "return": np.append(np.nan, 100 * np.diff(close)),
        "range": 100 * (high - low),
        "volume_change": np.append(np.nan, 100 * np.diff(volume)),
        "direction": pa.array(named, mask=np.isnan(ahead)),
    }
    return pa.table(columns).slice(1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("bars", type=Path)
    arguments.add_argument("out", type=Path)
    given = arguments.parse_args()
    found = table(pa.csv.read_csv(given.bars))
    pa.csv.write_csv(found, given.out)
    print(f"{given.out}: {found.num_rows:,} days")


if __name__ == "__main__":
    main()
