"""The cases that the bench measures: standard ones on random numbers, or the user's own job."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data import defaults
from slipstream.data.dataset import Dataset
from slipstream.engine.planning import resolve_batch_size
from slipstream.models import custom

ROWS, ROWS_ON_CPU = 60_000, 8_000
EPOCHS, EPOCHS_ON_CPU = 200, 20
WIDTH_ON_CPU = 32
SLOW: dict[str, Any] = {"plan": "off", "home": "loader", "sync": True, "rnn": "cudnn"}
SLOW |= dict.fromkeys(("capture", "compile", "fused"), False)


def get_preset(name: str, *, on_gpu: bool) -> dict[str, Any]:
    """Return settings of `[engine]`: Slipstream's own choice ("auto"), the usual advice ("classic":
    DataLoader workers, pinned memory, fp16, cuDNN benchmark), or the naive loop ("baseline": a
    DataLoader, fp32, a synchronisation after every step)."""
    match name:
        case "auto":
            return {}
        case "classic":
            return SLOW | {"cudnn_benchmark": True, "precision": "fp16" if on_gpu else "auto"}
        case "baseline":
            alone = {"workers": 0, "pinned": False, "non_blocking": False}
            return SLOW | alone | {"precision": "fp32"}
    raise AssertionError(name)


@dataclass(frozen=True)
class Case:
    """A model and its data."""

    name: str
    config: Config
    dataset: Dataset

    @property
    def batch(self) -> int:
        """The windows of a forward pass; a case never leaves `train.batch` to "auto"."""
        assert self.config.train.batch != "auto"
        return self.config.train.batch

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, for the record; paths are reduced to file names."""
        settings: dict[str, Any] = configs.to_json_values(self.config.model_dump())
        path = settings["data"]["path"]
        names = [Path(file).name for file in ([path] if isinstance(path, str) else path or [])]
        settings["data"]["path"] = names
        del settings["out"]
        return settings

    @property
    def description(self) -> str:
        """The case in a few words."""
        model, data = self.config.model, self.config.data
        sizes = "/".join(map(str, dict.fromkeys(model.sizes)))
        layers = f" x {model.layers}" if model.layers > 1 and len(set(model.sizes)) == 1 else ""
        width = f" {sizes}{layers}" if model.spec.has_hidden else ""
        direction = "bidirectional " if model.bidirectional else ""
        kind = model.kind.upper() if len(model.kind) < 5 else model.kind
        rows = f"{data.context} rows x {len(self.dataset.signature.inputs)}"
        return f"{direction}{kind}{width}, {rows}, batch {self.config.train.batch}"


def _define(kind: str, hidden: int | list[int], shape: tuple[int, int, int], **model: Any) -> Any:
    """Define a case; its shape is context rows, columns, and windows of a batch."""
    return {"kind": kind, "hidden": hidden, "layers": 1, "dropout": 0.0} | model, shape


STANDARD = {
    "A": _define("lstm", 128, (105, 4, 512), layers=2, bidirectional=True),
    "B": _define("lstm", 64, (24, 10, 256), layers=2),
    "C": _define("lstm", 128, (400, 4, 200)),
    "D": _define("lstm", 128, (150, 4, 256)),
    "GRU": _define("gru", 64, (24, 10, 256), layers=2),
    "MLP": _define("mlp", [128, 96, 64], (20, 29, 512), layers=3),
    "Transformer": _define("transformer", 128, (20, 29, 256), layers=3, heads=8),
}


def build_standard_cases(
    names: Iterable[str] = (), *, small: bool | None = None, **train: Any
) -> list[Case]:
    """Build the named standard cases, or all of them.

    Without a GPU they have 32 hidden units, a quarter of the batch and a third of the rows.
    """
    if small is None:
        small = not torch.cuda.is_available()
    if unknown := ", ".join(sorted(set(names) - set(STANDARD))):
        raise UserError(f"there is no case {unknown}; the cases are {', '.join(STANDARD)}")
    return [_build_standard_case(name, small, train) for name in (names or STANDARD)]


def _build_standard_case(name: str, small: bool, train: dict[str, Any]) -> Case:
    model, (context, columns, batch) = STANDARD[name]
    if small:
        context, batch = max(context // 3, 20), batch // 4
        if isinstance(model["hidden"], int):
            model = model | {"hidden": WIDTH_ON_CPU}
    inputs = [f"x{i}" for i in range(columns)]
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
    """Build a case of the user's job. The bench varies its engine settings; the device remains."""
    config = configs.load(source, overrides)
    custom.allow_classes(config)
    if config.masked:
        raise UserError('the bench measures training; remove train.objective = "masked"')
    config = defaults.resolve(config).config
    dataset = datasets.load_dataset(config)
    if dataset.memory is None:
        raise UserError(
            "the data are larger than memory and would be streamed; measure on a part of them: "
            "name fewer files in data.path"
        )
    engine = config.engine.model_dump(include={"device"})
    config = Config.model_validate(config.model_dump(exclude_unset=True) | {"engine": engine})
    return Case(config.name, resolve_batch_size(config, dataset), dataset)
