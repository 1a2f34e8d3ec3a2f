"""What it costs to watch a run in the app.

    python benchmarks/ui_watch.py [--repeats 5] [--epochs 40] [--out FOLDER]

`FOLDER` is that of the record, as in benchmarks/records/<date>-<machine>-ui-watch.

Trains the demo's model with nobody watching, and with a server of the app and one tab: its event
stream stays open and receives every line, the load of the machine and the predictions that the run
writes for it. The two take turns, each run in a process of its own. Compared are the steps a second
of training and validation, and the CPU seconds of the training process and of the server: a busy
machine disturbs the former more than the latter. The output is one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import psutil

from slipstream import config as configs

MOST_LOST = 0.02
"""Share of the speed that may be lost"""


class Trial(NamedTuple):
    """What one training took."""

    steps_per_s: float
    train_cpu_s: float
    server_cpu_s: float
    messages: int
    previews: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args()
    trials: dict[str, list[Trial]] = {"alone": [], "watched": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        config = write_job(folder, options.epochs)
        train(folder, config, None)  # kernels are built, files are cached
        for number in range(options.repeats):
            order = ("alone", "watched") if number % 2 else ("watched", "alone")
            for how in order:
                trials[how].append(measure(folder, config, watched=how == "watched"))
                print(how, trials[how][-1], file=sys.stderr)
    results = summarize(trials, options)
    print(json.dumps(results))
    if options.out:
        write_record(options.out, results)


def write_job(folder: Path, epochs: int) -> Path:
    """Write the demo with a fixed number of epochs and a plan by rules, the same in every run."""
    demo = configs.load_demo()
    config = demo.model_copy(
        update={
            "train": demo.train.model_copy(update={"epochs": epochs, "patience": "off"}),
            "engine": demo.engine.model_copy(update={"plan": "off", "device": "cpu"}),
        }
    )
    path = folder / "job.toml"
    path.write_text(configs.to_toml(config), encoding="utf-8")
    return path


def measure(folder: Path, config: Path, *, watched: bool) -> Trial:
    """Train once, with a server and a tab or without."""
    if not watched:
        return train(folder, config, None)
    command = [sys.executable, "-m", "slipstream", "ui", str(folder)]
    server = subprocess.Popen(
        [*command, "--no-browser", "--no-warm-worker"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        tab = Tab(server.stdout.readline().strip())
        process = psutil.Process(server.pid)
        before = sum(process.cpu_times()[:2])
        trial = train(folder, config, tab)
        spent = sum(process.cpu_times()[:2]) - before
        return trial._replace(server_cpu_s=spent, messages=tab.messages, previews=tab.previews)
    finally:
        server.terminate()
        server.wait(60)


def train(folder: Path, config: Path, tab: Tab | None) -> Trial:
    """Train in a process of its own; a tab opens the run as soon as there is one."""
    out = folder / "runs"
    known = set(out.glob("*-*Z*"))
    command = [sys.executable, "-m", "slipstream", "train", str(config), "--out", str(out)]
    process = subprocess.Popen([*command, "--quiet"])
    while tab is not None and process.poll() is None and not set(out.glob("*-*Z*")) - known:
        time.sleep(0.05)
    if tab is not None:
        (run,) = set(out.glob("*-*Z*")) - known
        threading.Thread(target=tab.watch, args=(f"runs/{run.name}",), daemon=True).start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"training ended with exit code {process.returncode}")
    (run,) = set(out.glob("*-*Z*")) - known
    summary: dict[str, Any] = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    seconds = summary["time"]["training_s"] + summary["time"]["validation_s"]
    return Trial(summary["steps"] / seconds, usage.ru_utime + usage.ru_stime, 0.0, 0, 0)


class Tab:
    """Reads the event stream of a run, as a browser does."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)
        self.token = parse_qs(parts.query)["token"][0]
        self.messages = self.previews = 0

    def watch(self, run: str) -> None:
        connection = http.client.HTTPConnection(self.host, self.port)
        headers = {"Authorization": f"Bearer {self.token}"}
        connection.request("GET", f"/events?run={run}", headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the stream of {run} answers with {response.status}")
        while line := response.readline():
            self.messages += line.startswith(b"event: ")
            self.previews += line.startswith(b"event: preview")


def summarize(trials: dict[str, list[Trial]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians, their ratios and all trials."""

    def take(how: str, name: str) -> list[float]:
        return [getattr(one, name) for one in trials[how]]

    speed = {how: statistics.median(take(how, "steps_per_s")) for how in trials}
    train_cpu = {how: statistics.median(take(how, "train_cpu_s")) for how in trials}
    server_cpu = statistics.median(take("watched", "server_cpu_s"))
    return {
        "job": "the demo, CPU",
        "epochs": options.epochs,
        "repeats": options.repeats,
        "cores": os.cpu_count(),
        "steps_per_s": speed,
        "lost_speed": 1 - speed["watched"] / speed["alone"],
        "train_cpu_s": train_cpu,
        "server_cpu_s": server_cpu,
        "added_train_cpu": train_cpu["watched"] / train_cpu["alone"] - 1,
        "server_cpu_share": server_cpu / train_cpu["alone"],
        "previews": statistics.median(take("watched", "previews")),
        "messages": statistics.median(take("watched", "messages")),
        "trials": {how: [one._asdict() for one in some] for how, some in trials.items()},
    }


def write_record(out: Path, results: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    speed, cpu = results["steps_per_s"], results["train_cpu_s"]
    result = (
        f"{100 * results['lost_speed']:.1f} % of the steps a second; CPU of training "
        f"{100 * results['added_train_cpu']:+.1f} %, of the server "
        f"{100 * results['server_cpu_share']:.1f} % of training's"
    )
    record = {"what": "Training watched in the app", "peer": "nobody watches", "result": result}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in record.items()]
    (out / "record.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [f"| {how} | {speed[how]:.1f} | {cpu[how]:.2f} |" for how in ("alone", "watched")]
    text = (
        "# What watching costs\n\n"
        f"`python benchmarks/ui_watch.py --repeats {results['repeats']} --epochs "
        f"{results['epochs']}`: the demo on {results['cores']} cores, in turns, medians. One tab "
        f"received {results['messages']:.0f} messages, {results['previews']:.0f} of them "
        "predictions.\n\n| | steps a second | CPU of training, s |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nLost: {result}. At most {100 * MOST_LOST:.0f} % are allowed.\n"
    )
    (out / "summary.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
