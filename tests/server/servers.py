"""A server of `slipstream serve` in a process of its own, and a client for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pyarrow.csv

from tests.conftest import HUNG_S

ARROW = "application/vnd.apache.arrow.stream"
JSON = {"Content-Type": "application/json"}


class Server(NamedTuple):
    process: subprocess.Popen[str]
    client: httpx.Client

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HUNG_S)

    def predict(self, body: Any, **options: Any) -> httpx.Response:
        return self.client.post("/predict", json=body, **options)

    def push(self, stream: str, rows: Any, **options: Any) -> httpx.Response:
        return self.client.post(f"/streams/{stream}", json=rows, **options)


@contextmanager
def start_server(run: Path, *options: str, **client: Any) -> Iterator[Server]:
    """A server at a free port of this machine; afterwards it is gone."""
    where = () if "--port" in options else ("--port", "0")
    command = [sys.executable, "-m", "slipstream", "serve", str(run), *where, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), url
        with httpx.Client(base_url=url, timeout=HUNG_S, **client) as opened:
            yield Server(process, opened)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def post_all(
    url: str, requests: Sequence[tuple[str, Any]], connections: int = 40
) -> list[dict[str, Any]]:
    """Post JSON bodies over many connections at a time; return the answers, all with status 200."""
    parts, answers = urlsplit(url), [{}] * len(requests)
    waiting = iter(enumerate(requests))

    async def work() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        for number, (path, content) in waiting:
            body = json.dumps(content).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n"
            )
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            length = next(int(one[15:]) for one in lines if one.startswith("content-length:"))
            answers[number] = json.loads(await reader.readexactly(length))
            assert lines[0].endswith(" 200 ok"), answers[number]
        writer.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return answers


def to_ipc(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def to_csv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink)
    return sink.getvalue().to_pybytes()
