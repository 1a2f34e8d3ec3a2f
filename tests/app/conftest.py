"""A server of the app in a thread, with a client that sends what it is told to."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from slipstream import config as configs
from slipstream import runs
from slipstream.app.app import create_app
from slipstream.app.jobs import DeviceLock, JobStore, find_default_device
from slipstream.app.security import Access, Security
from slipstream.app.workspace import Workspace
from slipstream.base.web_server import bind
from slipstream.events import Epoch, Start

TOKEN = "a-token-of-the-tests"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Site:
    """A server, and requests to it with a valid token unless told otherwise."""

    workspace: Workspace
    app: Security
    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str | None
    ) -> Answer:
        sent = {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {TOKEN}"}
        sent |= {name.replace("_", "-").title(): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, named, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str | None) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, value: Any, **headers: str | None) -> Answer:
        return self.send(
            "POST", path, json.dumps(value).encode(), content_type="application/json", **headers
        )


def start_site(folder: Path, *, starts_workers: bool = False, **options: Any) -> tuple[Site, Any]:
    """Start a server; return it with a function that stops it.

    Unless it starts workers, jobs stay in the queue, as where another worker waits for the device.
    """
    root = JobStore(folder.resolve()).root
    devices = () if starts_workers else {"cpu", find_default_device()}
    locks = [DeviceLock(root, device, "wait") for device in devices]
    assert all(lock.acquire() for lock in locks)
    workspace = Workspace(folder.resolve(), warm=False, **options)
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    app = create_app(workspace, Access(TOKEN, port))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))

    async def run() -> None:
        await server.serve(sockets=[bound])
        await workspace.tables.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)

    def stop() -> None:
        app.app.state.stopping = True
        server.should_exit = True
        thread.join()
        bound.close()
        for lock in locks:
            lock.release()

    return Site(workspace, app, port), stop


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site, stop = start_site(tmp_path)
    yield site
    stop()


def write_run(out: Path, name: str, *, finished: bool = True, test: float = 1.0) -> Path:
    """Write a run folder as a finished or stopped training leaves it, without its model."""
    config = configs.Config(name="job", data={"path": "a.csv", "targets": ["y"]})
    run = runs.create_run(name, out=str(out), files={"config.toml": runs.format_config(config)})
    folder = run.folder.rename(out / name)
    run = runs.Run(folder)
    facts: Any = {"series": 1, "parameters": 1, "plan": {}, "notes": [], "expected_s": 1.0}
    windows = {"train": 1}
    run.append(Start(run=str(folder), epochs=2, steps_per_epoch=1, windows=windows, **facts))
    for epoch in (1, 2):
        losses = {"train_loss": 1.0 / epoch, "val_loss": 2.0 / epoch}
        run.append(Epoch(epoch=epoch, step=epoch, best=True, **losses))
    if finished:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(b"1234")
        scores = {"mae": test, "rmse": test, "mse": test, "r2": 0.5, "max_error": 2.0, "bias": 0.0}
        result = {
            "metrics": {"test": scores, "val": scores, "train": scores},
            "scaled": {"test": {"mae": test, "mse": test}},
        }
        summary = {"name": "job", "epochs": 2, "seconds": 1.0, "baselines": {"ridge": result}}
        runs.write_metrics(run, result | summary)
        (folder / "report.html").write_text("<p>report</p>", encoding="utf-8")
    return folder
