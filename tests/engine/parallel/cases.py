"""Trainings that two processes do together, and one by itself: `python -m` with a rank's task."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream import runs
from slipstream.engine import loop
from slipstream.engine.parallel import Ranks, SilentRun, join
from slipstream.engine.planning import make_plan
from slipstream.kernels import build_library
from slipstream.models import custom
from slipstream.runs import Run
from tests.conftest import KINDS, merged, small_config, small_dataset, waves
from tests.engine.steps import make_task
from tests.labelled import CLASSIFY, states
from tests.logs import read_lines


class TwoLayers(nn.Module):
    def __init__(self, context: int, inputs: int, static: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(context * inputs, 8), nn.Linear(8, outputs)
        self.idle = nn.Parameter(torch.ones(3))  # has no gradient

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(inputs.transpose(0, 1).flatten(1))))
        return out


OWN = f"{__package__}.cases:TwoLayers"
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"model": {"kind": kind, "dropout": 0.2, "layers": 2}} for kind in KINDS},
    "own class": {"model": {"kind": OWN}},
    "own kernels": {"model": {"layers": 2, "dropout": 0.2}, "engine": {"rnn": "slipstream"}},
    "classes": merged(CLASSIFY, {"train": {"epochs": 2, "class_weights": [1.0, 2.0, 0.5]}}),
    "accumulated": {"train": {"batch": 16, "accumulate": 3, "clip": 0.1}},
    "odd batch": {"train": {"batch": 37, "clip": 0.1, "optimizer": "sgd", "lr": 0.1}},
    "batch of one": {"train": {"batch": 1, "epochs": 1}, "data": {"stride": 20}},
    "smaller passes": {"model": {"dropout": 0.2, "layers": 2}, "passes": 5},
    "augmented": {"augment": {"jitter": 0.1, "scaling": 0.1, "warp": 0.2}},
    "masked": {"train": {"objective": "masked"}, "pretrain": {"mask": "random"}},
    "channels": {"data": {"channels": "independent"}, "model": {"kind": "mlp", "dropout": 0.2}},
    "loader": {"engine": {"home": "loader", "workers": 0}},
}


def train(name: str, out: Path, ranks: Ranks | None) -> None:
    """Train a case; write its log, and the weights that it ends with."""
    sections = {key: value for key, value in CASES[name].items() if key != "passes"}
    config = small_config(out, **sections)
    custom.allow_classes(config)
    table = states(400) if name == "classes" else waves()
    dataset = small_dataset(config, table)
    chosen = replace(
        make_plan(config, data_bytes=0), micro_batch=ranks and CASES[name].get("passes")
    )
    run: Run = runs.create_run("t", out=str(out))
    if ranks is not None and not ranks.is_leader:
        run = SilentRun(run.folder)
    with chosen.flags():
        task = replace(make_task(config, dataset, chosen, run), ranks=ranks)
        loop.fit_single(task, chosen)
    save_file(task.model.state_dict(), out / "weights.safetensors")
    found = [e for e in read_lines(run) if e["event"] in ("log", "epoch", "trained")]
    (out / "log.json").write_text(
        json.dumps([[e["event"], e.get("step"), _pick(e)] for e in found])
    )


def _pick(event: dict[str, Any]) -> list[float]:
    names = ("loss", "lr", "train_loss", "val_loss", "best_loss", "epochs")
    return [event[name] for name in names if name in event]


def main(rank: str, size: str, store: str, out: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{store}"}
    with join(int(rank), int(size), torch.device("cpu"), **where) as ranks:
        for name in names:
            folder = Path(out) / name / rank
            folder.mkdir(parents=True)
            train(name, folder, ranks)


if __name__ == "__main__":
    build_library()
    main(*sys.argv[1:5], sys.argv[5:] or list(CASES))
