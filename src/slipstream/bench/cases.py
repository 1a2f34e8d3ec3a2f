"""What is measured: the standard cases on drawn numbers, or the user's own job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from slipstream import config as configs
from slipstream.autotune.workload import resolve_batch_size
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.errors import UserError
from slipstream.models import permission

ROWS, ROWS_ON_CPU = 60_000, 8_000
EPOCHS, EPOCHS_ON_CPU = 200, 20
WIDTH_ON_CPU = 32


@dataclass(frozen=True)
class Case:
    """A model and its data."""

    name: str
    config: Config
    dataset: Dataset

    @property
    def settings(self) -> dict[str, Any]:
        """For the record: every setting; of paths only the files' names, which mean something to
        others."""
        found = self.config.model_dump(mode="json")
        path = found["data"]["path"]
        names = [Path(one).name for one in ([path] if isinstance(path, str) else path or [])]
        found["data"]["path"] = names
        del found["out"]
        return found

    @property
    def what(self) -> str:
        """In a few words."""
        model, data = self.config.model, self.config.data
        sizes = "/".join(map(str, dict.fromkeys(model.sizes)))
        layers = f" x {model.layers}" if model.layers > 1 and len(set(model.sizes)) == 1 else ""
        width = f" {sizes}{layers}" if model.spec.has_hidden else ""
        both = "bidirectional " if model.bidirectional else ""
        columns = len(self.dataset.signature.inputs)
        return (
            f"{both}{model.kind.upper() if len(model.kind) < 5 else model.kind}{width}, "
            f"{data.context} rows x {columns}, batch {self.config.train.batch}"
        )


def _case(
    kind: str, hidden: int | list[int], context: int, columns: int, batch: int, **model: Any
) -> dict[str, Any]:
    return {
        "model": {"kind": kind, "hidden": hidden, "layers": 1, "dropout": 0.0} | model,
        "context": context,
        "columns": columns,
        "batch": batch,
    }


STANDARD = {
    "A": _case("lstm", 128, 105, 4, 512, layers=2, bidirectional=True),
    "B": _case("lstm", 64, 24, 10, 256, layers=2),
    "C": _case("lstm", 128, 400, 4, 200),
    "D": _case("lstm", 128, 150, 4, 256),
    "GRU": _case("gru", 64, 24, 10, 256, layers=2),
    "MLP": _case("mlp", [128, 96, 64], 20, 29, 512, layers=3),
    "Transformer": _case("transformer", 128, 20, 29, 256, layers=3, heads=8),
}


def build_standard_cases(
    names: Iterable[str] = (), *, small: bool | None = None, **train: Any
) -> list[Case]:
    """The named ones of the standard cases, or all; where there is no GPU, 32 units wide, with a
    quarter of the batch and a third of the rows."""
    if small is None:
        small = not torch.cuda.is_available()
    unknown = set(names) - set(STANDARD)
    if unknown:
        raise UserError(
            f"there is no case {', '.join(sorted(unknown))}; the cases are {', '.join(STANDARD)}"
        )
    return [_drawn(name, small, train) for name in (names or STANDARD)]


def _drawn(name: str, small: bool, train: dict[str, Any]) -> Case:
    given = STANDARD[name]
    model, context, batch = dict(given["model"]), given["context"], given["batch"]
    if small:
        context, batch = max(context // 3, 20), batch // 4
        if isinstance(model["hidden"], int):
            model["hidden"] = WIDTH_ON_CPU
    inputs = [f"x{i}" for i in range(given["columns"])]
    config = configs.load(
        {
            "name": f"case-{name}",
            "data": {"inputs": inputs, "targets": ["y"], "context": context, "horizon": 0},
            "model": model,
            "train": {"batch": batch, "epochs": EPOCHS_ON_CPU if small else EPOCHS} | train,
        }
    )
    draw = np.random.default_rng(0)
    rows = ROWS_ON_CPU if small else ROWS
    table = pa.table({column: draw.standard_normal(rows) for column in [*inputs, "y"]})
    return Case(name, config, datasets.load_dataset(config, table))


def build_case(source: Config | str | Path | Mapping[str, Any], overrides: Iterable[str]) -> Case:
    """The user's job. Its engine settings are the bench's to vary; only the device is kept."""
    config = configs.load(source, overrides)
    permission.allow_classes(config)
    if config.masked:
        raise UserError('the bench measures training; take train.objective = "masked" out')
    dataset = datasets.load_dataset(config)
    if dataset.memory is None:
        raise UserError(
            "the data are larger than memory and would be streamed; measure on a part of them: "
            "name fewer files in data.path"
        )
    engine = config.engine.model_dump(include={"device"})
    config = Config.model_validate(config.model_dump(exclude_unset=True) | {"engine": engine})
    config = resolve_batch_size(config, dataset)
    return Case(config.name, config, dataset)
