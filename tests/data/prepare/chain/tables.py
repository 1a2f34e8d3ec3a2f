"""Small tables, and what steps make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from slipstream import config as configs
from slipstream.data.columns import read_column
from slipstream.data.files import read_tables
from slipstream.data.prepare.chain import PrepareChain, PreparedTables, Replay

MINUTE = 60_000_000
START = 1_767_225_600_000_000  # 2026-01-01


def make_bars(rows: int = 120, *, names: tuple[str, ...] = ("A",), seed: int = 0) -> pa.Table:
    """Bars of 15 minutes of some series, one after the other."""
    draw = np.random.default_rng(seed)
    parts = []
    for name in names:
        close = 100 * np.exp(np.cumsum(0.004 * draw.standard_normal(rows)))
        spread = 0.003 * np.abs(draw.standard_normal(rows))
        times = START + 15 * MINUTE * np.arange(rows)
        parts.append(
            pa.table(
                {
                    "time": pa.array(times).cast(pa.timestamp("us")),
                    "name": [name] * rows,
                    "close": close,
                    "high": close * (1 + spread),
                    "low": close * (1 - spread),
                    "volume": draw.exponential(100, rows),
                }
            )
        )
    return pa.concat_tables(parts)


def load_data(steps: list[dict[str, Any]], **settings: Any) -> Any:
    base: dict[str, Any] = {"time": "time", "id": "name", "context": 8, "horizon": 2}
    return configs.load({"data": base | {"prepare": steps} | settings}).data


def prepare(
    table: Any,
    steps: list[dict[str, Any]],
    *,
    joins: Any = None,
    limits: Any = None,
    **settings: Any,
) -> PreparedTables:
    """Carry out the steps; outliers take their ranges from `limits`."""
    data = load_data(steps, **settings)
    chain = PrepareChain(data, replay=Replay(limits or {}, joins or {}))
    return chain.apply(read_tables(data, table))


def to_dict(prepared: PreparedTables) -> dict[str, Any]:
    """The columns of the only table."""
    (table,) = prepared.tables
    values = {name: read_column(table, name, "test") for name in table.column_names}
    return {name: column.to_numpy() for name, column in values.items()}
