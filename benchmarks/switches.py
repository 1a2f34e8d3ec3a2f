"""Measures what each setting does to a training step: one changed at a time, all in one run.

    python benchmarks/switches.py --out benchmarks/records/<date>-<hardware>-switches [--small]

Starts from what `auto` chooses for a case of `peers.py` and changes one setting. Figures are
medians over stretches of steps, beside the unchanged step measured shortly before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import torch

import slipstream
from slipstream import hardware, runs
from slipstream.engine import checkpoint
from slipstream.models import build

CASES = ("B", "D", "Transformer")
ON_GPU = torch.cuda.is_available()


def switches(case: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings to change, in groups, each with its name."""
    recurrent = case["model"]["kind"] in ("lstm", "gru")
    batch = case.get("batch", 256)
    if ON_GPU:
        for precision in ("fp32", "tf32", "bf16", "fp16"):
            yield f"precision = {precision}", {"precision": precision}
        yield "capture = false", {"capture": False}
        yield "steps_per_graph = 8", {"steps_per_graph": 8}
        if recurrent:
            yield "cudnn = standard", {"cudnn": "standard"}
            yield "cudnn_benchmark = true", {"cudnn_benchmark": True}
        else:
            yield "compile = true", {"compile": True}
            yield "compile = true, capture = false", {"compile": True, "capture": False}
        yield "sync = true", {"sync": True}
        yield "capture = false, sync = true", {"capture": False, "sync": True}
        yield "home = host", {"home": "host"}
        yield "home = host, pinned = false", {"home": "host", "pinned": False}
        yield "home = host, non_blocking = false", {"home": "host", "non_blocking": False}
        for workers in (0, 2, 4, 8):
            yield f"home = loader, workers = {workers}", {"home": "loader", "workers": workers}
        loader = {"home": "loader", "workers": 4}
        yield "home = loader, workers = 4, prefetch = 8", loader | {"prefetch": 8}
        yield "home = loader, workers = 4, pinned = false", loader | {"pinned": False}
        once = loader | {"persistent_workers": False}
        yield "home = loader, workers = 4, persistent_workers = false", once
    else:
        for threads in range(1, hardware.available_cores() + 1):
            yield f"threads = {threads}", {"threads": threads}
        if hardware.has_fast_bf16():
            yield "precision = bf16", {"precision": "bf16"}
        yield "home = loader, workers = 0", {"home": "loader", "workers": 0}
        yield "home = loader, workers = 2", {"home": "loader", "workers": 2}
    yield "fused = false", {"fused": False}
    yield "set_to_none = false", {"set_to_none": False}
    if case["model"]["kind"] != "mlp":
        yield "recompute = true", {"recompute": True}
    yield (
        "train.accumulate = 4, a quarter of the batch",
        {"train": {"accumulate": 4, "batch": batch // 4}},
    )
    yield "train.clip = off", {"train": {"clip": "off"}}
    yield "a quarter of train.batch, per window", {"train": {"batch": batch // 4}}
    yield "four times train.batch, per window", {"train": {"batch": batch * 4}}
    yield "half of data.context", {"context": case["context"] // 2}
    yield "twice data.context", {"context": case["context"] * 2}


def pinned_down(plan: dict[str, Any]) -> dict[str, Any]:
    """What auto chose, as settings."""
    found = {"plan": "off", "precision": plan["precision"], "threads": plan["threads"]}
    if plan["cudnn"]:
        found["cudnn"] = plan["cudnn"][0]
    return found


def measured(case: dict[str, Any], steps: int, change: dict[str, Any], base: dict[str, Any]) -> Any:
    change = dict(change)
    case = case | {"context": change.pop("context", case["context"])}
    data = peers.table(case["columns"], 20_000)
    return peers.ours(case, data, steps, change.pop("train", None), **(base | change))[0]


def by_step(small: bool) -> Iterator[dict[str, Any]]:
    fast, slow = (3, 3) if small else (60, 15)
    for name in ("B", "MLP") if small else CASES:
        case = peers.CASES[name]
        data = peers.table(case["columns"], 20_000)
        base = pinned_down(peers.ours(case, data, 2, plan="measure")[1])
        for i, (switch, change) in enumerate(switches(case)):
            slowly = change.get("home") == "loader" or change.get("capture") is False
            try:
                if i % 5 == 0:
                    unchanged = statistics.median(measured(case, fast, {}, base))
                times = measured(case, slow if slowly else fast, change, base)
            except RuntimeError as error:
                yield {"case": name, "switch": switch, "failed": str(error).split("\n", 1)[0]}
                continue
            windows = {"a quarter": 0.25, "four times": 4.0}
            factor = next((f for text, f in windows.items() if switch.startswith(text)), 1.0)
            yield {
                "case": name,
                "switch": switch,
                "ratio": statistics.median(times) / unchanged / factor,
                "ms": statistics.median(times),
                "low": min(times),
                "high": max(times),
                "auto_ms": unchanged,
            }


def by_run(small: bool) -> Iterator[dict[str, Any]]:
    """Settings that act between steps: whole runs, and the training thread's wait for a file."""
    case = peers.CASES["B"]
    data = peers.table(case["columns"], 4_000 if small else 60_000)
    epochs, repeats = (2, 1) if small else (8, 3)

    def run(**train: Any) -> Callable[[], float]:
        engine = {"log_every": train.pop("log_every", 50), "plan": "off"}
        config = peers.case_config(case, {"epochs": epochs, "patience": "off"} | train, **engine)

        def once() -> float:
            with tempfile.TemporaryDirectory() as out:
                moved = config.model_copy(update={"out": out})
                summary = slipstream.train(moved, data).summary
            phases = summary["seconds_by_phase"]
            return float(phases["training"] + phases["validation"])

        return once

    ways = {
        "as it is": run(),
        "log_every = 1": run(log_every=1),
        f"train.validate_every = {epochs}": run(validate_every=epochs),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, once in ways.items():
            times[way].append(once())
    for way, found in times.items():
        yield {"switch": way, "seconds": statistics.median(found), "all": found}
    for background in (False, True):
        waits = []
        config = peers.case_config(peers.CASES["A"])
        signature = slipstream.data.dataset.load(config, peers.table(4, 2_000)).signature
        device = hardware.choose_device("auto")
        model = build(config.model, signature).to(device)
        with tempfile.TemporaryDirectory() as out:
            folder = runs.create("checkpoint", out=out)
            with checkpoint.Writer(folder, background=background) as writer:
                for step in range(5):
                    began = time.perf_counter()
                    writer.save(step=step, weights=model.state_dict(), progress={})
                    waits.append(time.perf_counter() - began)
        yield {
            "switch": f"async_checkpoints = {str(background).lower()}",
            "seconds": statistics.median(waits),
            "all": waits,
        }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--small", action="store_true", help="few steps, for a CPU")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["SLIPSTREAM_CACHE"] = str(given.out / "cache")
    warnings.simplefilter("ignore")
    found = []
    for row in by_step(given.small):
        found.append(row)
        told = row.get("failed") or f"{row['ms']:9.3f} ms, auto {row['auto_ms']:.3f}"
        print(f"{row['case']:12s} {row['switch']:55s} {told}", flush=True)
    whole = []
    for row in by_run(given.small):
        whole.append(row)
        print(f"{row['switch']:68s} {row['seconds']:9.4f} s", flush=True)
    machine = hardware.describe(hardware.choose_device("auto"))
    told = {"hardware": machine, "steps": found, "runs": whole}
    (given.out / "results.json").write_text(json.dumps(told, indent=1, default=str))
    (given.out / "summary.md").write_text(summary(found, whole, machine))


def summary(found: list[dict[str, Any]], whole: list[dict[str, Any]], machine: Any) -> str:
    where = machine.get("gpu", f"{machine['cores']} cores ({machine['cpu']})")
    cases = list(dict.fromkeys(row["case"] for row in found))
    base = {c: next(row["auto_ms"] for row in found if row["case"] == c) for c in cases}
    lines = [
        f"# One setting changed, on {where}, torch {machine['torch']}",
        "",
        "Time of a step against auto's, measured shortly before (1.00 is no change; below it is",
        "faster).",
        "",
        "| setting | " + " | ".join(f"{c} ({base[c]:.3g} ms)" for c in cases) + " |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for switch in dict.fromkeys(row["switch"] for row in found):
        cells = []
        for case in cases:
            row = next((r for r in found if (r["case"], r["switch"]) == (case, switch)), None)
            cells.append(cell(row))
        lines.append(f"| {switch} | " + " | ".join(cells) + " |")
    lines += ["", "| between steps, case B | seconds |", "|---|---|"]
    lines += [f"| {row['switch']} | {row['seconds']:.4f} |" for row in whole]
    return "\n".join(lines) + "\n"


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return f"fails: {row['failed'][:40]}"
    return f"{row['ratio']:.2f}"


if __name__ == "__main__":
    main()
