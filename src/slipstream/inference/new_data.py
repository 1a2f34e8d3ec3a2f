"""New data for a trained model as a data set, on the host."""

from typing import Any

import torch

from slipstream.config import Config, Signature
from slipstream.data import windows
from slipstream.data.dataset import Dataset, HostSeries
from slipstream.data.prepare.chain.replay import Replay
from slipstream.data.scaler import Scaler
from slipstream.portable.rows import read_new_rows


def load_new_data(
    config: Config,
    signature: Signature,
    scaler: Scaler,
    source: Any,
    *,
    targets: bool,
    resample: bool = False,
    replay: Replay | None = None,
) -> Dataset:
    """Load new data, a path or a table, as one set named "all"; see `read_new_rows`."""
    rows = read_new_rows(
        config, signature, scaler, source, targets=targets, resample=resample, replay=replay
    )
    series = windows.build_series(*rows.scaled, rows.index.offsets, signature, rows.index.segments)
    return Dataset(
        signature=signature,
        scaler=scaler,
        index=rows.index,
        num_windows={"all": len(rows.starts)},
        left_out={"all": rows.left_out},
        period=None,
        notes=rows.notes,
        memory=HostSeries(series, {"all": torch.from_numpy(rows.starts)}, rows.raw.time),
    )
