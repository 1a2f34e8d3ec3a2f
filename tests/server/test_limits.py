"""What a server refuses, and that it goes on afterwards."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pytest

import slipstream
from slipstream import UserError
from slipstream.base.web_server import bind
from tests.conftest import HUNG_S, small_config, waves
from tests.server.servers import ARROW, Server, start_server, to_csv, to_ipc

TOKEN = "a-token-of-ours"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
LIMITS = ("--max-body-mb", "0.1", "--max-rows", "500", "--max-streams", "3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"targets": ["c"], "inputs": ["a", "b"], "horizon": 0}
    config = small_config(tmp_path_factory.mktemp("runs"), data=data, train={"epochs": 1})
    return slipstream.train(config, waves(400), quiet=True).run


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with start_server(run, *LIMITS) as started:
        yield started


@pytest.fixture(scope="module")
def closed(run: Path) -> Iterator[Server]:
    """A server with a token that works on two requests at a time, and a client that knows it."""
    with start_server(run, "--token", TOKEN, "--max-requests", "2", headers=BEARER) as started:
        yield started


@pytest.fixture(scope="module")
def hasty(run: Path) -> Iterator[Server]:
    """A server that waits for nothing for long."""
    with start_server(run, "--max-seconds", "2", "--stream-idle", "0.2") as started:
        yield started


@pytest.fixture(autouse=True)
def check_alive(server: Server) -> Iterator[None]:
    """After every test, the server answers as before."""
    yield
    assert server.process.poll() is None
    assert server.predict({"columns": waves(16).to_pydict()}).status_code == 200


def post(server: Server, content: bytes | str, kind: str = "application/json", **more: str):
    headers = {"Content-Type": kind, **more}
    return server.client.post("/predict", content=content, headers=headers)


def connect(server: Server) -> socket.socket:
    url = urlsplit(str(server.client.base_url))
    return socket.create_connection((url.hostname, url.port), timeout=HUNG_S)


NULLS = pa.table({"a": pa.nulls(10_000_000)})
BOMB = pa.table({"a": pa.array([0.0] * 400_000)})
NAMED = to_ipc(pa.table({"voltage": [1.0]})).replace(b"voltage", b"volt\xe4ge")
LATE = pa.table({"time": pa.array([1, 2**31 - 1], pa.date32()), "a": [1.0, 2.0], "b": [1.0, 2.0]})
REFUSED = {
    "a name in Arrow that is not UTF-8": (400, NAMED, ARROW),
    "half of a character as a name": (422, '[{"\\ud800": 1}]', "application/json"),
    "half of a character as a value": (422, '[{"a": "\\ud800"}]', "application/json"),
    "a date beyond year 9999": (422, to_ipc(LATE), ARROW),
    "a large body": (413, "[" + " " * 200_000 + "]", "application/json"),
    "many rows": (413, json.dumps([{"a": 1}] * 501), "application/json"),
    "many columns": (413, json.dumps([{f"x{i}": 1 for i in range(2001)}]), "application/json"),
    "columns of a CSV": (413, "," * 50_000 + "\n", "text/csv"),
    "rows of a CSV": (413, "a,b\n" + "1,2\n" * 1000, "text/csv"),
    "rows of Arrow": (413, to_ipc(NULLS), ARROW),
    "a compressed bomb": (413, to_ipc(BOMB, compression="zstd"), ARROW),
    "deep JSON": (400, "[" * 50_000, "application/json"),
    "NaN": (400, '[{"time": 0, "a": NaN, "b": 1}]', "application/json"),
    "an infinite number": (422, '[{"time": 0, "a": 1e999, "b": 1}]', "application/json"),
    "a huge integer": (422, '[{"time": 0, "a": 1' + "0" * 400 + ', "b": 1}]', "application/json"),
    "lists as values": (422, '[{"time": 0, "a": [1], "b": 1}]', "application/json"),
    "no table": (422, '"text"', "application/json"),
    "rows that are none": (422, "[1, 2]", "application/json"),
    "other keys": (422, '{"data": []}', "application/json"),
    "columns of other lengths": (422, '{"columns": {"a": [1], "b": [1, 2]}}', "application/json"),
    "no rows": (422, "[]", "application/json"),
    "nothing": (400, "", "application/json"),
    "no UTF-8": (400, b"\xff\xfe", "application/json"),
    "Arrow that is JSON": (400, '{"rows": []}', ARROW),
    "JSON that is Arrow": (400, to_ipc(waves(20)), "application/json"),
    "CSV that is Arrow": (400, to_ipc(waves(20)), "text/csv"),
    "cut Arrow": (400, to_ipc(waves(20))[:-300], ARROW),
    "a form": (415, "a=1", "application/x-www-form-urlencoded"),
    "plain text": (415, "[]", "text/plain"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_body_gets_a_clear_error(server, what):
    status, content, kind = REFUSED[what]
    for path in ("/predict", "/streams/bad"):
        answer = server.client.post(path, content=content, headers={"Content-Type": kind})
        assert answer.status_code == status, answer.text
        assert len(answer.json()["error"]) > 10
    assert server.client.get("/streams/bad").status_code == 404


def test_other_paths_methods_and_parameters_are_refused(server):
    client = server.client
    assert client.get("/").status_code == 404
    assert client.get("/predict").status_code == 405
    assert client.post("/health").status_code == 405
    assert client.post("/streams/" + "x" * 129, json=[]).status_code == 422
    assert client.post("/predict?evry=1", json=[]).status_code == 422
    assert client.post("/predict?every=2", json=[]).status_code == 422
    assert client.post("/streams/x?row=-1", json=[]).status_code == 422
    body = json.dumps(waves(20).to_pylist())
    assert post(server, body, Accept="image/png").status_code == 406
    assert post(server, body, **{"Content-Encoding": "gzip"}).status_code == 415
    for answer in (client.get("/"), client.get("/predict")):
        assert "GET /schema" in answer.json()["error"]


def test_pages_of_other_sites_are_refused(server):
    host = server.client.base_url.netloc.decode()
    port = server.client.base_url.port
    get = server.client.get
    assert get("/health", headers={"Host": f"attacker.example:{port}"}).status_code == 403
    assert get("/health", headers={"Host": f"127.0.0.1.attacker.example:{port}"}).status_code == 403
    assert get("/health", headers={"Origin": "http://attacker.example"}).status_code == 403
    assert get("/health", headers={"Origin": "http://127.0.0.1:1"}).status_code == 403
    assert get("/health", headers={"Origin": f"http://{host}"}).status_code == 200
    assert get("/health", headers={"Host": f"localhost:{port}"}).status_code == 200
    assert get("/health", headers={"Host": f"localhost:{int(port) + 1}"}).status_code == 403
    assert get("/health", headers={"Host": f"localhost:{port}:{port}"}).status_code == 403


def test_a_token_is_needed_where_one_is_set(closed):
    wrong = [{}, {"Authorization": TOKEN}, {"Authorization": "Bearer other"}]
    wrong.append({"Authorization": f"Basic {TOKEN}"})
    for headers in wrong:
        answer = httpx.get(closed.client.base_url.join("/schema"), headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert httpx.get(closed.client.base_url.join("/health")).json() == {"status": "ok"}
    assert closed.client.get("/health").json()["run"]
    assert closed.client.get("/schema").status_code == 200


@pytest.mark.parametrize("path", ["/schema", "/metrics", "/predict", "/streams/x"])
def test_a_page_under_any_name_gets_nothing_without_the_token(closed, path):
    """Behind a proxy, Host is any name; a browser never adds the token on its own."""
    other = {"Host": "models.example", "Origin": "https://attacker.example"}
    url = closed.client.base_url.join(path)
    post = path in ("/predict", "/streams/x")
    answer = httpx.post(url, headers=other, json=[]) if post else httpx.get(url, headers=other)
    assert answer.status_code == 401
    assert httpx.options(url, headers=other).status_code == 401  # before a page's real request
    assert not [name for name in answer.headers if name.startswith("access-control")]
    known = other | BEARER
    served = httpx.post(url, headers=known, json=[]) if post else httpx.get(url, headers=known)
    assert served.status_code == (422 if post else 200)


def test_an_address_that_others_reach_needs_a_token(run):
    command = [sys.executable, "-m", "slipstream", "serve", str(run), "--host", "0.0.0.0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "SLIPSTREAM_TOKEN" in result.stderr
    assert not result.stdout


def test_a_port_in_use_is_named(run, server):
    port = str(server.client.base_url.port)
    command = [sys.executable, "-m", "slipstream", "serve", str(run), "--port", port]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"port {port}: cannot be bound" in result.stderr


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(UserError, match=f"port {port}: a port is a number from 0 to 65535"):
        bind("127.0.0.1", port)


def test_there_are_no_more_streams_than_the_limit(server):
    rows = waves(2).to_pylist()
    for i in range(3):
        assert server.push(f"limited-{i}", rows).status_code == 200
    answer = server.push("limited-3", rows)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    for i in range(3):
        assert server.client.delete(f"/streams/limited-{i}").status_code == 204


@pytest.mark.slow
def test_a_body_that_does_not_arrive_is_given_up(hasty):
    with connect(hasty) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n[")
        answer = slow.recv(4096)
    assert b" 408 " in answer.split(b"\r\n")[0]


@pytest.mark.slow
def test_headers_that_do_not_arrive_are_given_up(hasty):
    with connect(hasty) as silent, connect(hasty) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: local")
        assert slow.recv(64) == b""  # closed by the server
        assert silent.recv(64) == b""
    assert hasty.client.get("/health").status_code == 200


def test_a_stream_without_rows_for_a_while_is_forgotten(hasty):
    rows = waves(20).to_pylist()
    assert hasty.push("idle", rows[:19]).status_code == 200
    while hasty.client.get("/streams/idle").status_code == 200:
        pass
    answer = hasty.push("idle", rows[19:], params={"row": 19})
    assert answer.status_code == 409
    assert answer.json()["rows"] == 0


def begin_body(server: Server) -> socket.socket:
    """A connection whose request lacks the end of its body."""
    connection = connect(server)
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    connection.sendall(f"{head}Content-Length: 10\r\n\r\n[".encode())
    return connection


def test_requests_beyond_the_limit_are_refused_until_others_are_done(closed):
    body = {"columns": waves(20).to_pydict()}
    with ExitStack() as held:
        held.enter_context(begin_body(closed))
        # until the server has read the headers of two; one of them is refused while it predicts
        while (answer := closed.predict(body)).status_code == 200:
            held.enter_context(begin_body(closed))
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
        assert "2 requests are being worked on" in answer.json()["error"]
        assert closed.client.get("/health").status_code == 200
        assert "slipstream_requests_total" in closed.client.get("/metrics").text
    while (answer := closed.predict(body)).status_code == 503:
        pass  # until it has noticed that both have left
    assert answer.status_code == 200


def test_a_client_that_leaves_costs_nothing_but_its_request(server):
    body = json.dumps(waves(20).to_pylist()).encode()
    head = f"POST /streams/left HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    sent = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
    for size in (10, len(sent) // 2, len(sent) - 1):
        with connect(server) as client:
            client.sendall(sent[:size])
    assert server.client.get("/streams/left").status_code == 404
    with connect(server) as client:
        client.sendall(sent)
    answer = server.push("left", waves(21).to_pylist()[20:])  # waits for the request before
    assert answer.status_code == 200
    assert answer.json()["rows"] in (1, 21)
    server.client.delete("/streams/left")


def damage(draw: random.Random, content: bytes) -> bytes:
    """Change, remove, repeat or insert some bytes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(changed) + 1)
        size = draw.choice((1, 1, 2, 8, 100))
        match draw.randrange(4):
            case 0:
                changed[at : at + size] = draw.randbytes(len(changed[at : at + size]))
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = changed[at : at + size]
            case _:
                changed[at:at] = draw.choice((b"null", b"-", b"1e9999", b'"', b"[" * size, b"\0"))
    return bytes(changed)


def make_odd_table(draw: random.Random, rows: pa.Table) -> pa.Table:
    """A table of which some columns hold what nobody expects there."""
    odd = [
        pa.array([value])
        for value in (None, 1e308, float("nan"), 2**63 - 1, True, b"\xff", "x", "1,5", "", [1])
    ]
    odd += [
        pa.array([2**62], kind)
        for kind in (pa.timestamp("s"), pa.timestamp("ns", "Europe/Berlin"), pa.date64())
    ]
    odd += [pa.array([2**62], pa.duration("s")), pa.array([2**31 - 1], pa.date32())]
    odd += [pa.array([1], pa.time64("ns")), pa.array([1.5], pa.float16()), pa.array([{"a": 1}])]
    odd += [pa.array(["z"], pa.large_string()), pa.array([b"abcd"], pa.binary(4))]
    odd += [pa.array(["q"]).dictionary_encode(), pa.array([1.0]).dictionary_encode()]
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*rows.column_names, "x", "", "\0", "ä" * 300])
        columns[name] = draw.choice(odd).take(pa.array([0] * rows.num_rows))
    return pa.table(columns)


@pytest.mark.parametrize("seed", range(2))
def test_odd_tables_get_answers(server, seed):
    draw = random.Random(seed)
    for _ in range(100):
        table = make_odd_table(draw, waves(24, seed=seed).slice(0, draw.choice((1, 20))))
        body = to_ipc(table)
        body = damage(draw, body) if draw.random() < 0.3 else body
        headers = {"Content-Type": ARROW, "Accept": draw.choice(("text/csv", "*/*", ARROW))}
        path = draw.choice(("/predict", "/predict?every=1", "/predict?resample=1", "/streams/odd"))
        answer = server.client.post(path, content=body, headers=headers)
        assert answer.status_code in (200, 400, 409, 413, 422), f"{answer.text} {table.schema}"
    server.client.delete("/streams/odd")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bodies_get_answers_and_leave_streams_alone(server, seed):
    draw, rows = random.Random(seed), waves(24, seed=seed)
    server.push("fuzzed", rows.slice(0, 20).to_pylist())
    new = rows.slice(20)
    valid = {
        "application/json": json.dumps(new.to_pylist()).encode(),
        "text/csv": to_csv(new),
        ARROW: to_ipc(new, compression=draw.choice((None, "lz4", "zstd"))),
    }
    for _ in range(60):
        kind = draw.choice(list(valid))
        content = damage(draw, valid[kind])
        headers = {"Content-Type": kind, "Accept": draw.choice(("text/csv", "*/*", ARROW))}
        path = draw.choice(("/predict", "/streams/fuzzed?row=99"))
        answer = server.client.post(path, content=content, headers=headers)
        assert answer.status_code in (200, 400, 409, 413, 422), answer.text
    after = server.push("fuzzed", new.to_pylist(), params={"row": 20}).json()
    assert len(after["predictions"]) == 4
    whole = server.predict({"columns": rows.to_pydict()}).json()["predictions"]
    assert [row["c_predicted"] for row in after["predictions"]] == [
        row["c_predicted"] for row in whole[-4:]
    ]
    server.client.delete("/streams/fuzzed")


def test_damaged_requests_get_answers(server):
    draw = random.Random(0)
    body = json.dumps(waves(20).to_pylist())
    head = f"POST /predict?every=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    valid = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode()
    for _ in range(60):
        with connect(server) as client:
            client.sendall(damage(draw, valid[:130]) + valid[130:])
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(64)
            assert not answer or answer.startswith(b"HTTP/1.1 ")
            assert b" 500 " not in answer


@pytest.mark.slow
def test_sigterm_finishes_running_requests(run):
    with start_server(run) as server:
        body = {"columns": waves(20_000).to_pydict()}
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.predict(body)))
        thread.start()
        while "slipstream_batch_windows_count" not in server.client.get("/metrics").text:
            pass
        assert server.stop() == 0
        thread.join()
    assert answers[0].status_code == 200
    assert len(answers[0].json()["predictions"]) == 20_000 - 15


@pytest.mark.slow
def test_streams_go_on_after_a_graceful_stop_with_a_state_file(run, tmp_path):
    rows, state = waves(30, seed=9).to_pylist(), tmp_path / "streams"
    with start_server(run, "--state", str(state)) as server:
        whole = server.push("whole", rows).json()["predictions"]
        server.push("cut", rows[:20])
        assert server.stop() == 0
    with start_server(run, "--state", str(state)) as server:
        after = server.push("cut", rows[20:], params={"row": 20}).json()["predictions"]
        assert [{**row, "series": "whole"} for row in after] == whole[-10:]
        state.write_bytes(b"no streams")
    command = [sys.executable, "-m", "slipstream", "serve", str(run), "--state", str(state)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "is no file of streams" in result.stderr
