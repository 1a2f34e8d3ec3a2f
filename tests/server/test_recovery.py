"""A server that is killed while many clients use it, and started again at the same port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

import slipstream
from tests.conftest import HUNG_S, close, slow, small_config, waves
from tests.server.servers import Server, start_server

CONTEXT = 16
CLIENTS = 3
"""Of each route"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"targets": ["c"], "inputs": ["a", "b"], "horizon": 0}
    config = small_config(tmp_path_factory.mktemp("runs"), data=data, train={"epochs": 1})
    return slipstream.train(config, waves(400), quiet=True).run


class Client(threading.Thread):
    """Sends requests until the end, each one again until it is answered."""

    def __init__(self, url: str, name: str, table: pa.Table) -> None:
        super().__init__(name=name, daemon=True)
        self.url, self.table = url, table
        self.answers: list[list[float]] = []
        """The predictions of every answer"""
        self.num_lost = self.num_unknown = 0
        """Requests that got no answer, and those to a stream that the server did not know"""
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=HUNG_S) as client:
                self.work(client)
        except BaseException as error:
            self.error = error

    def work(self, client: httpx.Client) -> None:
        raise NotImplementedError

    def send(self, request: Callable[[], httpx.Response]) -> httpx.Response:
        begin = time.monotonic()
        while time.monotonic() - begin < HUNG_S:
            try:
                return request()
            except httpx.TransportError:
                self.num_lost += 1
                time.sleep(0.05)
        raise TimeoutError(f"{self.name}: no server for {HUNG_S} s")

    def record(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        self.answers.append([row["c_predicted"] for row in answer.json()["predictions"]])


class TableClient(Client):
    """Sends one table again and again."""

    def work(self, client: httpx.Client) -> None:
        body = {"columns": self.table.to_pydict()}
        while not self.ended.is_set():
            self.record(self.send(lambda: client.post("/predict", json=body)))

    def check(self, run: Path) -> None:
        expected: list[float] = slipstream.predict(run, self.table)["c_predicted"].to_pylist()
        for answer in self.answers:
            close(answer, expected)


class StreamClient(Client):
    """Sends a series row by row, and the last context again to a server that does not know it."""

    def work(self, client: httpx.Client) -> None:
        rows, path, first = self.table.to_pylist(), f"/streams/{self.name}", 0

        def push(begin: int, end: int) -> httpx.Response:
            position = {"row": begin - first}
            return self.send(lambda: client.post(path, json=rows[begin:end], params=position))

        for number in range(len(rows)):
            answer = push(number, number + 1)
            if answer.status_code == 409:
                assert "send the rows of the last context again" in answer.text
                self.num_unknown += answer.json()["rows"] == 0
                self.send(lambda: client.delete(path))
                first = max(number - CONTEXT + 1, 0)
                answer = push(first, number + 1)
            self.record(answer)
            if self.ended.is_set():
                return

    def check(self, run: Path) -> None:
        """The rows of the context that were sent again are not predicted again."""
        sent = self.table.slice(0, len(self.answers))
        expected: list[float] = slipstream.predict(run, sent)["c_predicted"].to_pylist()
        close([value for answer in self.answers for value in answer], expected)


def wait_for_answers(clients: Sequence[Client], number: int) -> None:
    """Wait until every client has had so many answers more."""
    goals = [len(one.answers) + number for one in clients]
    begin = time.monotonic()
    while any(len(one.answers) < goal for one, goal in zip(clients, goals, strict=True)):
        assert all(one.is_alive() for one in clients), [one.error for one in clients]
        assert time.monotonic() - begin < HUNG_S
        time.sleep(0.01)


def make_clients(server: Server) -> list[TableClient | StreamClient]:
    url = str(server.client.base_url)
    tables = [TableClient(url, f"table-{i}", waves(40, seed=i)) for i in range(CLIENTS)]
    streams = [StreamClient(url, f"stream-{i}", waves(5000, seed=i)) for i in range(CLIENTS)]
    return [*tables, *streams]


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, slow(4)])
def test_clients_recover_from_a_server_that_is_killed_under_load(run, num_kills):
    with ExitStack() as stack:
        server = stack.enter_context(start_server(run))
        port = str(server.client.base_url.port)
        clients = make_clients(server)
        for one in clients:
            one.start()
        for _ in range(num_kills):
            wait_for_answers(clients, 5)
            server.process.kill()
            server.process.wait()
            server = stack.enter_context(start_server(run, "--port", port))
        wait_for_answers(clients, 5)
        for one in clients:
            one.ended.set()
        for one in clients:
            one.join(HUNG_S)
        assert server.stop() == 0
    for one in clients:
        assert one.error is None
        assert one.num_lost >= num_kills
        assert one.num_unknown == num_kills * isinstance(one, StreamClient)
        one.check(run)
