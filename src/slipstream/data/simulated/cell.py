"""An embedded data set: a simulated lithium cell under random drive cycles.

Thirty-six cells of one type, each driven from (nearly) full to (nearly) empty at its own ambient
temperature. The model behind it is the usual second-order equivalent circuit:

    voltage = OCV(soc) + R0 * I + V1 + V2         I < 0 while discharging
    dV1/dt = -V1 / tau1 + R1 * I / tau1           charge transfer, 20 s
    dV2/dt = -V2 / tau2 + R2 * I / tau2           diffusion, 250 s
    dsoc/dt = I / capacity
    heat * dT/dt = I^2 * R0 + V1^2 / R1 + V2^2 / R2 - cooling * (T - ambient)

Resistances grow in the cold (Arrhenius) and near empty, so that the voltage means different
things at different temperatures and loads: what a straight line cannot follow and a network
can. Cells differ by a few percent in capacity and resistance; sensors have noise and the
current sensor an offset. One seed gives one data set, on any machine.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[np.float64]

SETS = ("train",) * 24 + ("val",) * 4 + ("test",) * 8
CAPACITY_AH = 3.0
R0_OHM, R1_OHM, R2_OHM = 0.030, 0.020, 0.025
TAU1_S, TAU2_S = 20.0, 250.0
ACTIVATION_K = 2200.0
HEAT_J_PER_K, COOLING_W_PER_K = 42.0, 0.06
RECORD_EVERY_S = 5
LONGEST_S = 3 * 3600
EMPTY_SOC, EMPTY_V = 0.05, 2.8
MODES = ("rest", "city", "country", "motorway")
# mean current and fluctuation of each driving mode, in ampere
MEAN_A = np.array([0.0, -1.6, -2.6, -4.5])
SPREAD_A = np.array([0.02, 2.2, 1.6, 1.2])
CHANGE_PROBABILITY = 1 / 150  # of the driving mode, each second
FLUCTUATION_S = 6.0


def open_circuit_voltage(soc: Array) -> Array:
    """Return the open-circuit voltage of a nickel-rich cathode: steep when empty, flat in the
    middle, rising when full."""
    bend = 0.09 * np.tanh((soc - 0.62) / 0.12) - 0.42 * np.exp(-soc / 0.045)
    return np.asarray(3.52 + 0.32 * soc + bend + 0.19 * soc**4)


def simulate(seed: int = 0) -> pa.Table:
    """Simulate one long table: cell, set, time_s, voltage_V, current_A, temperature_degC,
    soc_percent and the driving mode: rest, city, country or motorway."""
    draw = np.random.default_rng(seed)
    cells = len(SETS)
    capacity_as = 3600 * CAPACITY_AH * (1 + 0.02 * draw.standard_normal(cells))
    spread = 1 + 0.05 * draw.standard_normal(cells)
    ambient = draw.permutation(np.linspace(-10, 40, cells))
    offset_a = 0.02 * draw.standard_normal(cells)

    soc = draw.uniform(0.85, 1.0, cells)
    v1, v2 = np.zeros(cells), np.zeros(cells)
    temperature, mode = ambient.copy(), np.zeros(cells, dtype=int)
    fluctuation = np.zeros(cells)
    running = np.ones(cells, dtype=bool)
    decay1, decay2 = 1 - np.exp(-1 / TAU1_S), 1 - np.exp(-1 / TAU2_S)
    records: list[tuple[Array, ...]] = []
    recorded: list[npt.NDArray[np.bool_]] = []

    for second in range(LONGEST_S):
        change = draw.random(cells) < CHANGE_PROBABILITY
        mode = np.where(change, draw.integers(len(MEAN_A), size=cells), mode)
        kick = draw.standard_normal(cells) * np.sqrt(2 / FLUCTUATION_S)
        fluctuation += -fluctuation / FLUCTUATION_S + kick
        current = MEAN_A[mode] + SPREAD_A[mode] * fluctuation
        current = np.minimum(np.maximum(current, -12.0), 5.0)

        cold = np.exp(ACTIVATION_K * (1 / (temperature + 273.15) - 1 / 298.15)) * spread
        r0 = R0_OHM * cold * (1 + 0.8 * np.exp(-soc / 0.08))
        r1, r2 = R1_OHM * cold, R2_OHM * cold
        v1 += (r1 * current - v1) * decay1
        v2 += (r2 * current - v2) * decay2
        voltage = open_circuit_voltage(soc) + r0 * current + v1 + v2
        soc = np.minimum(soc + current / capacity_as, 1.0)
        heat = current**2 * r0 + v1**2 / r1 + v2**2 / r2
        temperature += (heat - COOLING_W_PER_K * (temperature - ambient)) / HEAT_J_PER_K

        running &= (soc > EMPTY_SOC) & (voltage > EMPTY_V)
        if not running.any():
            break
        if second % RECORD_EVERY_S == 0:
            noise = draw.standard_normal((3, cells))
            measured = (
                voltage + 0.002 * noise[0],
                current + offset_a + 0.02 * noise[1],
                temperature + 0.1 * noise[2],
                100 * soc,
            )
            records.append((np.full(cells, second), *measured, mode))
            recorded.append(running.copy())
    return _make_table(np.array(records), np.array(recorded))


def _make_table(records: Array, recorded: npt.NDArray[np.bool_]) -> pa.Table:
    """Return one table of the records [time, column, cell] that the mask [time, cell] selects, cell
    after cell."""
    lengths = recorded.sum(axis=0)
    names = [f"cell-{i:02d}" for i in range(1, len(lengths) + 1)]
    time_s, *measured, mode = records.transpose(1, 2, 0)[:, recorded.T]
    columns = ("voltage_V", "current_A", "temperature_degC", "soc_percent")
    return pa.table(
        {
            "cell": np.repeat(names, lengths),
            "set": np.repeat(SETS, lengths),
            "time_s": time_s.astype(np.int64),
            **dict(zip(columns, measured, strict=True)),
            "drive": np.array(MODES)[mode.astype(np.int64)],
        }
    )
