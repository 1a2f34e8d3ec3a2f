from __future__ import annotations

import numpy as np
import pytest

from slipstream.data.simulated import cell


@pytest.mark.slow
def test_one_seed_gives_one_data_set():
    first, second = cell.simulate(3), cell.simulate(3)
    assert first.equals(second)
    assert not first.equals(cell.simulate(4))


def test_the_cell_is_physically_plausible():
    table = cell.simulate()
    voltage, current = table["voltage_V"].to_numpy(), table["current_A"].to_numpy()
    soc, temperature = table["soc_percent"].to_numpy(), table["temperature_degC"].to_numpy()
    assert 2.75 < voltage.min() < voltage.max() < 4.3
    assert -13 < current.min() < 0 < current.max() < 6
    assert 0 < soc.min() < soc.max() <= 100
    assert -12 < temperature.min() < temperature.max() < 65
    assert np.unique(np.diff(table["time_s"].to_numpy())[:100]).tolist() == [cell.RECORD_EVERY_S]
    assert set(table["set"].to_pylist()) == {"train", "val", "test"}


def test_charge_is_conserved():
    table = cell.simulate().to_pandas()
    one = table[table.cell == "cell-01"]
    drawn_ah = -np.trapezoid(one.current_A, one.time_s) / 3600
    lost = (one.soc_percent.iloc[0] - one.soc_percent.iloc[-1]) / 100
    assert 0.9 * cell.CAPACITY_AH < drawn_ah / lost < 1.1 * cell.CAPACITY_AH


def test_the_open_circuit_voltage_rises_with_charge():
    voltage = cell.open_circuit_voltage(np.linspace(0, 1, 200))
    assert (np.diff(voltage) > 0).all()
    assert 2.9 < voltage[0] < voltage[-1] < 4.25
