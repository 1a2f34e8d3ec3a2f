"""Times one training step under Slipstream's presets and under Lightning, all in one run.

    python benchmarks/peers.py --out benchmarks/records/<date>-<hardware>-peers [--small]

The same model, data and batch everywhere. Lightning runs twice: as people run it (mixed precision,
workers, clipping, a loss logged each step) and at its best (no logging, clipping or bars, fused
AdamW; the fastest of the precisions and numbers of workers asked for). `auto` is what
`slipstream train` does by itself, its plan measured first. Figures are medians over stretches of
steps, after a warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from slipstream import config as configs
from slipstream import hardware
from slipstream.data import dataset as datasets
from slipstream.data.windows import Series
from slipstream.engine import measure, plan
from slipstream.engine.job import Task, set_up
from slipstream.models import build
from slipstream.runs import Run

RECURRENT = {"kind": "lstm", "layers": 1, "dropout": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "A": {
        "model": RECURRENT | {"hidden": 128, "layers": 2, "bidirectional": True},
        "context": 105,
        "columns": 4,
        "batch": 512,
    },
    "B": {"model": RECURRENT | {"hidden": 64, "layers": 2}, "context": 24, "columns": 10},
    "C": {"model": RECURRENT | {"hidden": 128}, "context": 400, "columns": 4, "batch": 200},
    "D": {"model": RECURRENT | {"hidden": 128}, "context": 150, "columns": 4},
    "H160": {
        "model": RECURRENT | {"hidden": 160},
        "context": 100,
        "columns": 4,
        "batch": 512,
    },
    "GRU": {
        "model": RECURRENT | {"kind": "gru", "hidden": 64, "layers": 2},
        "context": 24,
        "columns": 10,
    },
    "MLP": {
        "model": {"kind": "mlp", "hidden": [128, 96, 64], "dropout": 0.0},
        "context": 20,
        "columns": 29,
        "batch": 512,
    },
    "Transformer": {
        "model": {"kind": "transformer", "hidden": 128, "layers": 3, "heads": 8, "dropout": 0.0},
        "context": 20,
        "columns": 29,
        "batch": 256,
    },
}
STRETCHES, WARM_UP = 7, 20


def case_config(
    case: dict[str, Any], train: dict[str, Any] | None = None, **engine: Any
) -> configs.Config:
    return configs.load(
        {
            "data": {
                "inputs": [f"x{i}" for i in range(case["columns"])],
                "targets": ["y"],
                "context": case["context"],
                "horizon": 0,
            },
            "model": case["model"],
            "train": {"batch": case.get("batch", 256), "epochs": 200} | (train or {}),
            "engine": engine,
        }
    )


def table(columns: int, rows: int) -> pa.Table:
    draw = np.random.default_rng(0)
    made = {f"x{i}": draw.standard_normal(rows) for i in range(columns)}
    return pa.table(made | {"y": draw.standard_normal(rows)})


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ours(
    case: dict[str, Any],
    data: pa.Table,
    steps: int,
    train: dict[str, Any] | None = None,
    **engine: Any,
) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds per step with these settings, and the plan."""
    config = case_config(case, train, **engine)
    dataset = datasets.load(config, data)
    assert dataset.memory is not None
    chosen = plan.make(config, data_bytes=dataset.data_bytes)
    torch.manual_seed(0)
    model = build(config.model, dataset.signature).to(chosen.device)
    series = dataset.memory.series
    if chosen.home == "device":
        series = series.to(chosen.device)
    task = Task(config, model, dataset, series, Run(Path("nowhere")))
    chosen = measure.decide(task, chosen)
    times = []
    with chosen.flags():
        job = set_up(task, chosen)
        done = 0
        for stretch in range(STRETCHES + 1):
            wait()
            began = time.perf_counter()
            count = steps if stretch else min(WARM_UP, steps)
            for _ in range(count):
                if done % job.home.num_steps == 0:
                    job.flush()
                    job.home.begin(done // job.home.num_steps)
                    job.tape.begin([1e-3] * job.home.num_steps)
                job.advance()
                if config.engine.sync:
                    float(job.tape.losses[done % job.home.num_steps])
                done += 1
            job.flush()
            wait()
            if stretch:
                times.append(1e3 * (time.perf_counter() - began) / count)
        assert not job.failures(), job.failures()
        job.close()
    return times, chosen.to_dict()


class SingleWindows(Dataset[Any]):
    def __init__(self, series: Series, context: int) -> None:
        self.inputs, self.targets = series.inputs.contiguous(), series.targets.contiguous()
        self.context = context

    def __len__(self) -> int:
        return len(self.inputs) - self.context + 1

    def __getitem__(self, start: int) -> Any:
        end = start + self.context
        return self.inputs[start:end], self.targets[end - 1]


class Module(lightning.LightningModule):
    """The same network, batch first as people have it."""

    def __init__(self, model: nn.Module, *, log: bool) -> None:
        super().__init__()
        self.model, self.logs = model, log

    def training_step(self, batch: Any, _: int) -> Any:
        inputs, targets = batch
        out = self.model(inputs.transpose(0, 1), None)[:, 0, :, 0]
        loss = nn.functional.mse_loss(out, targets)
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        if self.logs:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)


class PlainRecurrent(nn.Module):
    """What people hand to Lightning: nn.LSTM and a linear layer."""

    def __init__(self, model: configs.Model, columns: int) -> None:
        super().__init__()
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}[model.kind]
        ways = 2 if model.bidirectional else 1
        self.body = cell(
            columns, model.sizes[0], len(model.sizes), bidirectional=model.bidirectional
        )
        self.head = nn.Linear(model.sizes[0] * ways, 1)

    def forward(self, inputs: torch.Tensor, _: None) -> torch.Tensor:
        return self.head(self.body(inputs)[0][-1])[:, None, :, None]


class Clock(lightning.Callback):
    def __init__(self, steps: int) -> None:
        self.steps, self.times, self.began = steps, [], 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        done = _[4] + 1 - WARM_UP
        if done >= 0 and done % self.steps == 0:
            wait()
            now = time.perf_counter()
            if done:
                self.times.append(1e3 * (now - self.began) / self.steps)
            self.began = now


def under_lightning(
    case: dict[str, Any], data: pa.Table, steps: int, *, workers: int, precision: str, best: bool
) -> list[float]:
    config = case_config(case, device="cpu")
    dataset = datasets.load(config, data)
    assert dataset.memory is not None
    torch.manual_seed(0)
    if config.model.kind in ("lstm", "gru"):
        model: nn.Module = PlainRecurrent(config.model, case["columns"])
    else:
        model = build(config.model, dataset.signature)
    clock = Clock(steps)
    on_gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision=precision,
        max_steps=WARM_UP + STRETCHES * steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if best else 1.0,
        callbacks=[clock],
        log_every_n_steps=50,
    )
    loader = DataLoader(
        SingleWindows(dataset.memory.series, case["context"]),
        batch_size=config.train.batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=on_gpu,
        persistent_workers=workers > 0,
    )
    trainer.fit(Module(model, log=not best), loader)
    return clock.times


def plain_loop(case: dict[str, Any], data: pa.Table, steps: int) -> list[float]:
    """A loop without any framework, as good as a page of advice makes it on this device."""
    config = case_config(case, device="cpu")
    dataset = datasets.load(config, data)
    assert dataset.memory is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if config.model.kind in ("lstm", "gru"):
        model: nn.Module = PlainRecurrent(config.model, case["columns"])
    else:
        model = build(config.model, dataset.signature)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    loader = DataLoader(
        SingleWindows(dataset.memory.series, case["context"]),
        batch_size=config.train.batch,
        shuffle=True,
    )
    times: list[float] = []
    batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))
    for stretch in range(STRETCHES + 1):
        wait()
        began = time.perf_counter()
        count = steps if stretch else min(WARM_UP, steps)
        for _ in range(count):
            inputs, targets = (t.to(device) for t in next(batches))
            loss = nn.functional.mse_loss(model(inputs.transpose(0, 1), None)[:, 0, :, 0], targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        wait()
        if stretch:
            times.append(1e3 * (time.perf_counter() - began) / count)
    return times


def ways(
    case: dict[str, Any], data: pa.Table, small: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    slow, fast = (2, 2) if small else (15, 60)
    if torch.cuda.is_available():
        yield "baseline", lambda: ours(case, data, slow, preset="baseline")
        yield "classic", lambda: ours(case, data, slow, preset="classic")
        yield (
            "Lightning as people run it",
            lambda: under_lightning(case, data, slow, workers=4, precision="16-mixed", best=False),
        )
        for precision, workers in itertools.product(
            ("32-true", "16-mixed", "bf16-mixed"), (0, 4, 8)
        ):
            yield (
                f"Lightning at its best, {precision}, {workers} workers",
                lambda p=precision, w=workers: under_lightning(
                    case, data, slow, workers=w, precision=p, best=True
                ),
            )
        if case["model"]["kind"] in ("lstm", "gru"):
            for precision in ("fp32", "tf32"):
                yield (
                    f"captured, {precision}, cuDNN as PyTorch chooses",
                    lambda p=precision: ours(
                        case, data, fast, precision=p, cudnn="persistent", plan="off"
                    ),
                )
                yield (
                    f"auto, but {precision}",
                    lambda p=precision: ours(case, data, fast, precision=p, plan="measure"),
                )
            yield (
                "auto, but from host memory",
                lambda: ours(case, data, fast, home="host", plan="measure"),
            )
    else:
        yield "plain loop", lambda: plain_loop(case, data, slow)
        for workers in (0, 2):
            yield (
                f"Lightning at its best, {workers} workers",
                lambda w=workers: under_lightning(
                    case, data, slow, workers=w, precision="32-true", best=True
                ),
            )
    yield "auto", lambda: ours(case, data, fast, plan="measure")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--cases", default=",".join(CASES))
    arguments.add_argument("--small", action="store_true", help="few steps, for a CPU")
    arguments.add_argument("--only", default="", help="ways whose name holds this")
    given = arguments.parse_args()
    if given.small:
        global STRETCHES, WARM_UP
        STRETCHES, WARM_UP = 5, 3
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["SLIPSTREAM_CACHE"] = str(given.out / "cache")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, list[float]]] = {}
    plans: dict[str, Any] = {}
    for name in given.cases.split(","):
        case = CASES[name]
        data = table(case["columns"], 8_000 if given.small else 60_000)
        results[name] = {}
        for way, run in ways(case, data, given.small):
            if given.only not in way:
                continue
            try:
                found = run()
            except RuntimeError as error:
                print(f"{name:12s} {way:45s} failed: {str(error)[:90]}", flush=True)
                continue
            if isinstance(found, tuple):
                plans[f"{name}: {way}"] = found[1]
                found = found[0]
            results[name][way] = found
            print(f"{name:12s} {way:45s} {statistics.median(found):9.3f} ms", flush=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    machine = hardware.describe(device)
    machine["lightning"] = lightning.__version__
    told = {"hardware": machine, "ms": results, "plans": plans}
    (given.out / "results.json").write_text(json.dumps(told, indent=1, default=str))
    (given.out / "summary.md").write_text(summary(results, plans, machine))
    print(summary(results, plans, machine))


def summary(
    results: dict[str, dict[str, list[float]]], plans: dict[str, Any], machine: dict[str, Any]
) -> str:
    where = machine.get("gpu", f"{machine['cores']} cores ({machine['cpu']})")
    lines = [
        f"# Training steps on {where}, torch {machine['torch']}, Lightning {machine['lightning']}",
        "",
        f"Milliseconds per step: medians of {STRETCHES} stretches (lowest to highest).",
        "",
    ]
    for name, found in results.items():
        case = CASES[name]
        lines += [
            f"## {name}: {case['model']}, {case['context']} rows x {case['columns']}, "
            f"batch {case.get('batch', 256)}",
            "",
            "| way | ms per step | auto is faster by |",
            "|---|---|---|",
        ]
        auto = statistics.median(found["auto"]) if "auto" in found else float("nan")
        for way, times in sorted(found.items(), key=lambda item: -statistics.median(item[1])):
            middle = statistics.median(times)
            spread = f"{min(times):.3f} to {max(times):.3f}"
            lines.append(f"| {way} | {middle:.3f} ({spread}) | {middle / auto:.2f}x |")
        chosen = plans.get(f"{name}: auto")
        if chosen:
            tried = "; ".join(
                f"{e['candidate']}: "
                + (f"{e['ms']:.3f} ms" if "ms" in e else str(list(e.values())[1]))
                for e in chosen["evidence"]
            )
            lines += [
                "",
                f"The plan took {chosen['precision']}, cuDNN {'/'.join(chosen['cudnn']) or '-'}, "
                f"{chosen['threads']} threads. Tried: {tried}.",
            ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
