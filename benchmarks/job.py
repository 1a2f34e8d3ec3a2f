"""Times whole jobs to the same validation loss, from the command to the result.

    python benchmarks/job.py --data <folder> --out benchmarks/records/<date>-<hardware>-job

The two examples with public data: LG HG2 (lg_hg2_1hz.parquet) and ETTh1 (ETTh1.csv). Every way is
a command of its own: start of the interpreter, imports, reading, capture and all. Lightning trains
the same network on the same windows with the same optimizer, schedule and clipping, mixed
precision, pinned and persistent workers. The loss to reach is the highest of the ways' best ones,
so that each of them gets there; the time counts up to the validation that first did.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
JOBS = {
    "LG HG2": (EXAMPLES / "lg-hg2-soc.toml", "lg_hg2_1hz.parquet"),
    "ETTh1": (EXAMPLES / "etth1-lstm.toml", "ETTh1.csv"),
}
LIGHTNING = {
    "Lightning, 16-mixed, 4 workers": ("16-mixed", 4),
    "Lightning, tf32, no workers": ("32-true", 0),
}
VALIDATION = re.compile(r"^epoch \d+: .*validation ([0-9.e+-]+)")


def command(way: str, config: Path, path: Path, out: Path) -> list[str]:
    settings = ["--set", f"data.path={path}", "--set", f"out={out / 'runs'}"]
    if way in LIGHTNING:
        precision, workers = LIGHTNING[way]
        return [
            sys.executable,
            __file__,
            "--lightning",
            str(config),
            str(path),
            precision,
            str(workers),
        ]
    given = ["--set", f"engine.preset={way}"]
    return [sys.executable, "-m", "slipstream", "train", str(config), *settings, *given]


def timed(arguments: list[str]) -> dict[str, Any]:
    """Run a command; when each validation loss was told, and when it was over."""
    began = time.perf_counter()
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    told, text = [], []
    for line in process.stderr:
        text.append(line)
        found = VALIDATION.match(line)
        if found:
            told.append((time.perf_counter() - began, float(found[1])))
    if process.wait():
        raise SystemExit("".join(text))
    return {"validations": told, "seconds": time.perf_counter() - began}


def seconds_to(run: dict[str, Any], loss: float) -> float:
    return next(at for at, found in run["validations"] if found <= loss)


def under_lightning(config_path: str, path: str, precision: str, workers: int) -> None:
    import lightning
    from torch.utils.data import DataLoader, Dataset

    from slipstream import config as configs
    from slipstream.data import dataset as datasets
    from slipstream.data import windows
    from slipstream.engine import optim
    from slipstream.models import build
    from slipstream.objectives import window_losses

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    config = configs.load(Path(config_path), (f"data.path={path}",))
    train, data = config.train, datasets.load(config)
    assert data.memory is not None
    series = data.memory.series
    torch.manual_seed(config.seed)

    class Windows(Dataset[Any]):
        def __init__(self, which: str) -> None:
            self.starts = data.memory.starts[which]

        def __len__(self) -> int:
            return len(self.starts)

        def __getitem__(self, i: int) -> Any:
            inputs, targets, _ = windows.raw(series, self.starts[i : i + 1])
            return inputs[:, 0], targets[0]

    def loader(which: str, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            Windows(which),
            batch_size=train.batch,
            shuffle=shuffle,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
        )

    batches = loader("train", shuffle=True)
    rates = [r for e in range(train.epochs) for r in optim.rates(train, e, len(batches))]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(config.model, data.signature)

        def loss(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            folded = windows.folded(inputs.transpose(0, 1), targets, None, series)
            return window_losses(self.model(folded.inputs, None), folded.targets, train).mean()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                loss = float(self.trainer.callback_metrics["val_loss"])
                print(
                    f"epoch {self.current_epoch + 1}: validation {loss:.4g}",
                    file=sys.stderr,
                    flush=True,
                )

        def configure_optimizers(self) -> Any:
            decay = train.weight_decay
            optimizer = torch.optim.AdamW(self.parameters(), lr=1.0, weight_decay=decay)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: rates[min(step, len(rates) - 1)]
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        precision=precision,
        max_epochs=train.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if train.clip == "off" else train.clip,
        num_sanity_val_steps=0,
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(
                os.environ.get("TMPDIR", "/tmp"), monitor="val_loss"
            )
        ],
    )
    module = Module()
    trainer.fit(module, batches, loader("val", shuffle=False))
    trainer.validate(module, loader("test", shuffle=False), ckpt_path="best", verbose=False)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--jobs", default=",".join(JOBS))
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["SLIPSTREAM_CACHE"] = str(given.out / "cache")
    ways = ["auto", "classic", *LIGHTNING]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in given.jobs.split(","):
        config, file = JOBS[name]
        results[name] = {way: [] for way in ways}
        for _ in range(given.repeats):
            for way in ways:
                run = timed(command(way, config, (given.data / file).resolve(), given.out))
                results[name][way].append(run)
                best = min(loss for _, loss in run["validations"])
                print(f"{name:8s} {way:32s} {run['seconds']:6.1f} s, best {best:.4g}", flush=True)
    summary = summarize(results)
    (given.out / "results.json").write_text(json.dumps(results, indent=1))
    (given.out / "summary.md").write_text(summary)
    print(summary)


def summarize(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    lines = [f"# Whole jobs on {where}, torch {torch.__version__}", ""]
    for name, ways in results.items():
        target = max(
            min(loss for _, loss in run["validations"]) for runs in ways.values() for run in runs
        )
        lines += [
            f"## {name}: seconds from the command to a validation loss of {target:.4g}",
            "",
            "| way | to the loss | to the end of the job | auto is faster by |",
            "|---|---|---|---|",
        ]
        times = {way: [seconds_to(run, target) for run in runs] for way, runs in ways.items()}
        auto = statistics.median(times["auto"])
        for way, found in times.items():
            middle = statistics.median(found)
            ends = statistics.median(run["seconds"] for run in ways[way])
            spread = f"{min(found):.1f} to {max(found):.1f}"
            lines.append(f"| {way} | {middle:.1f} ({spread}) | {ends:.1f} | {middle / auto:.1f}x |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--lightning":
        under_lightning(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
