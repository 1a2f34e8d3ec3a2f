"""Makes the raw files behind examples/cycler-soc.toml and examples/bars-direction.toml.

    python dev/raw.py cycler cells/     # a folder of CSV files, as a battery cycler exports them
    python dev/raw.py bars bars/        # bars of 15 minutes, 1 hour and 4 hours of one market

The cycler records ten rows a second, with noise and single wrong readings, the temperature in
Fahrenheit. Bars are stamped with the start of their period; the market drifts slowly up and down,
which the longer bars show best. One seed gives one set of files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from scipy import signal

from slipstream.data.simulated.cell import open_circuit_voltage

NUM_CELLS, CELL_ROWS, RATE_HZ = 12, 24_000, 10
MINUTES = 4 * 365 * 24 * 60 // 2
START = np.datetime64("2024-01-01", "m")


def write_cells(folder: Path, draw: np.random.Generator) -> None:
    """One file for each discharge: the usual first-order equivalent circuit under a random load."""
    for cell in range(1, NUM_CELLS + 1):
        target = np.repeat(draw.uniform(-8, 1, CELL_ROWS // 300), 300)
        current = signal.lfilter([0.05], [1, -0.95], target)  # loads do not jump
        current += 0.3 * draw.standard_normal(CELL_ROWS)
        soc = 100 * (draw.uniform(0.9, 1) + np.cumsum(current) / RATE_HZ / 3600 / 3.0)
        slow = signal.lfilter([0.02 / 200], [1, -(1 - 1 / 200)], current)
        resistance = 0.02 + 0.03 * np.exp(-np.maximum(soc, 0) / 15)  # grows near empty
        voltage = open_circuit_voltage(soc / 100) + resistance * current + slow
        voltage += 0.01 * draw.standard_normal(CELL_ROWS)
        voltage[draw.integers(0, CELL_ROWS, 20)] = 99.9  # wrong readings
        heat = signal.lfilter([1e-4], [1, -(1 - 1e-4)], current**2)
        columns = {
            "time_s": np.arange(CELL_ROWS) / RATE_HZ,
            "voltage_V": voltage.round(4),
            "current_A": current.round(4),
            "temperature_F": (32 + 1.8 * (25 + heat)).round(2),
            "soc_percent": soc.round(3),
        }
        pa.csv.write_csv(pa.table(columns), folder / f"cell-{cell:02d}.csv")


def write_bars(folder: Path, draw: np.random.Generator) -> None:
    """Bars of three periods of one walk, minute by minute."""
    drift = signal.lfilter([1], [1, -0.9995], draw.standard_normal(MINUTES))
    returns = 6e-4 * draw.standard_normal(MINUTES) + 1.5e-6 * drift
    close = 100 * np.exp(np.cumsum(returns))
    volume = draw.exponential(10, MINUTES)
    for name, minutes in {"15min": 15, "1h": 60, "4h": 240}.items():
        prices = close.reshape(-1, minutes)
        columns = {
            "time": START + np.arange(0, MINUTES, minutes),
            "open": prices[:, 0].round(4),
            "high": prices.max(axis=1).round(4),
            "low": prices.min(axis=1).round(4),
            "close": prices[:, -1].round(4),
            "volume": volume.reshape(-1, minutes).sum(axis=1).round(2),
        }
        columns["time"] = columns["time"].astype("datetime64[s]")
        pa.csv.write_csv(pa.table(columns), folder / f"bars-{name}.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cycler", "bars"))
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    write = {"cycler": write_cells, "bars": write_bars}[chosen.what]
    write(chosen.folder, np.random.default_rng(0))
