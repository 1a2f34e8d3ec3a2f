"""From the click on "Start training" to the first loss in the browser, in parts.

    python benchmarks/ui_click.py [--repeats 7] [--no-warm-worker] [--device cpu]

Starts `slipstream ui` on an empty folder, waits until its spare worker is ready, and does over HTTP
what the pages do: start the demo, wait for its run, load the run's page, read the event stream. The
first repetition is listed by itself: it measures the plan of the demo's shapes where no earlier run
has, and saves it. Each run is stopped after its first loss. The output is one JSON object, with
medians in seconds since the click and CPU seconds of the server and of the worker. No browser and
no network are used but loopback.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import psutil

from slipstream import config as configs
from slipstream.app import forms, jobs
from slipstream.app.jobs import OPEN, JobStore, choose_queue

READY_S = 120.0
LOSS_S = 120.0


class Client:
    """Requests to the app, as its pages send them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = str(parts.hostname), int(parts.port or 80)
        self.headers = {"Authorization": f"Bearer {parse_qs(parts.query)['token'][0]}"}

    def open(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self.address, timeout=LOSS_S)
        if body is None:
            connection.request("GET", path, headers=self.headers)
        else:
            headers = self.headers | {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse()

    def ask(self, path: str, body: Any = None) -> Any:
        with self.open(path, body) as answer:
            content = answer.read()
            if answer.status != 200:
                raise SystemExit(f"{path}: status {answer.status}: {content.decode()[:500]}")
            is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
            return json.loads(content) if is_json else content

    def read_events(self, run: str) -> Any:
        """Yield the events of a run's log as they come."""
        with self.open(f"/events?run={quote(run)}") as stream:
            kind = ""
            for line in stream:
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: ") and kind == "lines":
                    yield from json.loads(line[6:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="auto", help="engine.device")
    parser.add_argument("--no-warm-worker", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder).resolve(), options)
    print(json.dumps(result, indent=1))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start the app, click some times, and return what came out."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "slipstream", "ui", str(folder), "--no-browser"]
    command += ["--no-warm-worker"] * options.no_warm_worker
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    store, device = JobStore(folder), choose_queue(options.device)
    try:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip())
        start_s = time.perf_counter() - began
        if not options.no_warm_worker:
            wait_until(lambda: jobs.has_ready_worker(store.root, device), "a warm worker")
        ready_s = time.perf_counter() - began
        clicks = []
        for _ in range(options.repeats + 1):
            clicks.append(click(client, store, psutil.Process(process.pid), options.device))
            if not options.no_warm_worker:
                wait_until(lambda: jobs.has_ready_worker(store.root, device), "a warm worker")
            time.sleep(0.5)  # as a user would; the worker tidies up
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
        wait_until(lambda: not is_worker_alive(store, device), "the worker's end")
    first, later = clicks[0], clicks[1:]
    names = [name for name in first if name != "worker"]
    return {
        "device": device,
        "warm": not options.no_warm_worker,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "server_start_s": round(start_s, 3),
        "worker_ready_s": round(ready_s, 3),
        "first_click": first,
        "median": {name: round(statistics.median(one[name] for one in later), 3) for name in names},
        "largest_to_loss_s": max(one["loss_s"] for one in later),
        "workers": len({one["worker"] for one in clicks}),
        "clicks": later,
    }


def click(client: Client, store: JobStore, server: psutil.Process, device: str) -> dict[str, Any]:
    """Start the demo and return the seconds until each part of the way to its first loss."""
    demo = configs.load(configs.load_demo(), (f"engine.device={device}",))
    settings = forms.fill(demo) | {"data.path": demo.data.paths[0]}
    times: dict[str, Any] = {}
    server_cpu_s, clicked_at, began = read_cpu_s(server), time.time(), time.perf_counter()

    def note(name: str) -> None:
        times.setdefault(name, round(time.perf_counter() - began, 3))

    job = client.ask("/api/start", {"settings": settings})["job"]
    note("answer_s")
    while (now := client.ask(f"/api/job/{job}?wait=10"))["run"] is None:
        if now["error"] or now["state"] not in OPEN:
            raise SystemExit(f"the job {now['state']}: {now['error']}")
    note("run_s")
    record = store.read(job)
    worker = psutil.Process(record.pid)
    times["claim_s"] = round((record.started_at or 0.0) - clicked_at, 3)
    client.ask(f"/run/{quote(now['run'])}")
    note("page_s")
    for event in client.read_events(now["run"]):
        if event["event"] in ("start", "log"):
            note({"start": "plan_s", "log": "loss_s"}[event["event"]])
        if event["event"] == "log":
            break
    times["server_cpu_s"] = round(read_cpu_s(server) - server_cpu_s, 3)
    times["worker"] = worker.pid
    client.ask(f"/api/job/{job}/stop", {})
    wait_until(lambda: store.read(job).state not in OPEN, "the run's end")
    ended = store.read(job)
    times["stop_s"] = round((ended.ended_at or 0.0) - clicked_at - times["loss_s"], 3)
    return times


def read_cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def is_worker_alive(store: JobStore, device: str) -> bool:
    locks = (jobs.DeviceLock(store.root, device, one) for one in ("wait", "use"))
    return not all(lock.is_free() for lock in locks)


def wait_until(condition: Any, what: str) -> None:
    until = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"{what} did not come within {READY_S:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
