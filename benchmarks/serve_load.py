"""Requests a second that `slipstream serve` answers with a 99th percentile under 20 ms.

    python benchmarks/serve_load.py RUN [--clients 50] [--seconds 5] [--route stream]

Starts the server in a process of its own at a free port of this machine and sends requests from 50
connections, each at a steady rate, whatever the answers do; the latency of a request counts from
the time at which it was due. The rate is doubled until the percentile is beyond the limit, then
halved in between. The output is one JSON object. Nothing but loopback is spoken to, and the whole
takes at most `--budget` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

LIMIT_MS = 20.0
STEPS = 3
"""Halvings between the last rate within the limit and the first beyond it"""


class Load(NamedTuple):
    """What one rate gave."""

    rate: float
    answered: float
    p50_ms: float
    p99_ms: float
    errors: int

    @property
    def is_within_limit(self) -> bool:
        return not self.errors and self.p99_ms < LIMIT_MS and self.answered > 0.95 * self.rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds in all")
    parser.add_argument("--route", choices=("predict", "stream"), default="stream")
    options = parser.parse_args()
    begin = time.perf_counter()
    command = [sys.executable, "-m", "slipstream", "serve", str(options.run), "--port", "0"]
    server = subprocess.Popen([*command, "--quiet"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        start_s = time.perf_counter() - begin
        loads = asyncio.run(find_rate(url, options))
        best = max((one for one in loads if one.is_within_limit), key=lambda one: one.rate)
        memory = read_memory_mb(server.pid)
    finally:
        server.terminate()
        code = server.wait(60)
    print(
        json.dumps(
            {
                "run": str(options.run),
                "route": options.route,
                "clients": options.clients,
                "requests_per_s": round(best.answered, 1),
                "p50_ms": round(best.p50_ms, 2),
                "p99_ms": round(best.p99_ms, 2),
                "start_s": round(start_s, 3),
                "memory_mb": memory,
                "exit_code": code,
                "rates": [one._asdict() for one in loads],
            }
        )
    )


async def find_rate(url: str, options: argparse.Namespace) -> list[Load]:
    """Double the rate until the limit is passed, then look in between."""
    end = time.perf_counter() + options.budget
    clients = [await Client.connect(url, number) for number in range(options.clients)]
    bodies = await make_bodies(clients[0], options.route)
    await fill_streams(clients, bodies)
    loads: list[Load] = []
    rate, low, high = 2.0 * options.clients, 0.0, 0.0
    for _ in range(24):
        if time.perf_counter() + options.seconds > end or (high and len(loads) >= 24):
            break
        loads.append(await measure(clients, bodies, rate, options.seconds))
        print(loads[-1], file=sys.stderr)
        if loads[-1].is_within_limit:
            low = rate
        else:
            high = rate
        if high and (high - low) / high < 2.0**-STEPS:
            break
        rate = (low + high) / 2 if high else 2 * rate
    return loads


async def fill_streams(clients: list[Client], bodies: Bodies) -> None:
    """Send every client's first requests, so that each further one is answered by a prediction."""
    for client in clients:
        for _ in range(1 if bodies.route == "predict" else bodies.rows):
            status, content = await client.request("POST", bodies.path(client), bodies.next(client))
        if status != 200 or not json.loads(content)["predictions"]:
            raise SystemExit(
                f"{content.decode()}: the run needs rows a second apart and no data.id, and each "
                "answer a prediction"
            )


async def measure(clients: list[Client], bodies: Bodies, rate: float, seconds: float) -> Load:
    """Send requests at a steady rate, spread over the clients."""
    pause = len(clients) / rate
    begin = time.perf_counter() + 0.05
    count = max(int(seconds / pause), 1)

    async def run(client: Client) -> list[float]:
        latencies = []
        first = begin + pause * client.number / len(clients)
        for number in range(count):
            due = first + number * pause
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            status, _ = await client.request("POST", bodies.path(client), bodies.next(client))
            latencies.append((time.perf_counter() - due) * 1e3 if status == 200 else float("inf"))
        return latencies

    results = await asyncio.gather(*(run(client) for client in clients))
    elapsed = time.perf_counter() - begin
    every = [one for some in results for one in some]
    fine = [one for one in every if one != float("inf")]
    if len(fine) < 2:
        return Load(rate, 0.0, float("inf"), float("inf"), len(every) - len(fine))
    parts = statistics.quantiles(fine, n=100)
    return Load(rate, len(fine) / elapsed, parts[49], parts[98], len(every) - len(fine))


class Bodies:
    """Bodies of requests: a table of one context each, or the next row of the client's stream."""

    def __init__(self, route: str, columns: list[str], time_columns: list[str], rows: int) -> None:
        self.route, self.columns, self.time_columns = route, columns, time_columns
        self.rows = rows
        self.sent: dict[int, int] = {}
        table = {name: [self.value(name, row) for row in range(rows)] for name in self.names}
        self.table = json.dumps({"columns": table}).encode()

    @property
    def names(self) -> list[str]:
        return [*self.time_columns, *self.columns]

    def value(self, name: str, row: int) -> float:
        return float(row) if name in self.time_columns else 1.0 + 0.1 * (row % 7)

    def path(self, client: Client) -> str:
        return "/predict" if self.route == "predict" else f"/streams/client-{client.number}"

    def next(self, client: Client) -> bytes:
        if self.route == "predict":
            return self.table
        row = self.sent[client.number] = self.sent.get(client.number, -1) + 1
        return json.dumps([{name: self.value(name, row) for name in self.names}]).encode()


async def make_bodies(client: Client, route: str) -> Bodies:
    """Read from the server's schema which columns it wants."""
    _, content = await client.request("GET", "/schema", b"")
    schema = json.loads(content)
    row = schema["components"]["schemas"]["Table"]["oneOf"][2]["items"]["properties"]
    texts = [name for name, kind in row.items() if "string" in kind["type"]]
    rows = int(schema["info"]["description"].split("window has ")[1].split()[0])
    return Bodies(route, [name for name in row if name not in texts], texts, rows)


class Client:
    """One connection that stays open; only this machine is spoken to."""

    def __init__(self, number: int, host: str, streams: Any) -> None:
        self.number, self.host = number, host
        self.reader, self.writer = streams

    @classmethod
    async def connect(cls, url: str, number: int) -> Client:
        parts = urlsplit(url)
        if parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise SystemExit(f"{url}: only a server on this machine is put under load")
        streams = await asyncio.open_connection(parts.hostname, parts.port)
        return cls(number, parts.netloc, streams)

    async def request(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request and return the status and the body of its answer."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(body)}\r\n"
        self.writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        lines = answer.decode("latin-1").lower().split("\r\n")
        length = next(int(one[15:]) for one in lines if one.startswith("content-length:"))
        return int(lines[0].split()[1]), await self.reader.readexactly(length)


def read_memory_mb(pid: int) -> float | None:
    """Return the largest resident memory of the server; None where the system does not say."""
    path = Path(f"/proc/{pid}/status")
    if not path.exists():
        return None
    line = next(one for one in path.read_text().splitlines() if one.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024, 1)


if __name__ == "__main__":
    main()
