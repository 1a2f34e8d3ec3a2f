"""Who may use the app: every route and method, over raw HTTP."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from slipstream.app import security
from slipstream.app.security import Access
from tests.app.conftest import TOKEN, Site
from tests.conftest import slow

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def list_requests(site: Site) -> list[tuple[str, str]]:
    """Every method on every route of the router, whether the route knows it or not."""
    app: Any = site.app.app
    paths = [re.sub(r"{[^}]*}", "x", route.path) for route in app.routes]
    return [(method, path) for path in [*paths, "/nowhere"] for method in METHODS]


def test_the_router_has_routes_of_all_screens(site):
    assert len(list_requests(site)) > 100


def test_no_route_answers_without_a_token(site):
    for method, path in list_requests(site):
        assert site.send(method, path, authorization=None).status == 401, (method, path)
        wrong = site.send(method, f"{path}?token=wrong", authorization="Bearer wrong")
        assert wrong.status == 401, (method, path)


@pytest.mark.parametrize(
    "host", ["evil.example", *map(slow, ("127.0.0.1", "127.0.0.1:1", "localhost:80", "")), None]
)
def test_no_route_answers_under_another_host_or_port(site, host):
    for method, path in list_requests(site):
        status = site.send(method, path, host=host).status
        assert status in (400, 403), (method, path)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        *map(slow, ("http://127.0.0.1:1", "https://127.0.0.1:{port}", "null", "")),
    ],
)
def test_no_route_answers_a_page_of_another_origin(site, origin):
    for method, path in list_requests(site):
        status = site.send(method, path, origin=origin.format(port=site.port)).status
        assert status == 403, (method, path)


@pytest.mark.slow
def test_no_route_answers_what_another_site_embeds(site):
    for method, path in list_requests(site):
        for where in ("cross-site", "same-site"):
            answer = site.send(method, path, sec_fetch_site=where, sec_fetch_mode="no-cors")
            assert answer.status == 403, (method, path)


def test_own_pages_and_other_names_of_loopback_are_served(site):
    host = f"127.0.0.1:{site.port}"
    assert site.get("/", origin=f"http://{host}", sec_fetch_site="same-origin").status == 200
    assert site.get("/", host=f"localhost:{site.port}").status == 200
    assert site.get("/", host=f"LOCALHOST:{site.port}").status == 200


def test_the_token_of_the_url_becomes_a_cookie_and_leaves_the_address(site):
    first = site.get(f"/new?start=demo&token={TOKEN}", authorization=None)
    assert first.status == 303
    assert first.headers["location"] == "/new?start=demo"
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    pair = cookie.partition(";")[0]
    assert site.get("/", authorization=None, cookie=pair).status == 200
    assert site.get("/", authorization=None, cookie=f"{pair}x").status == 401


def test_a_redirect_with_the_token_stays_on_this_server(site):
    answer = site.get(f"//evil.example/?token={TOKEN}", authorization=None)
    assert answer.headers.get("location", "/") == "/evil.example/"


def test_every_response_has_the_policy_and_refuses_framing(site):
    for method, path in list_requests(site):
        if path == "/events":
            continue
        headers = site.send(method, path, b"" if method == "POST" else None).headers
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy, (method, path)
        assert "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"


def test_no_template_has_an_inline_script_style_or_handler():
    from importlib import resources

    for file in resources.files("slipstream.app").joinpath("templates").iterdir():
        text = file.read_text("utf-8")
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text), file.name
        for script in re.findall(r"<script[^>]*>", text):
            assert "src=" in script or "application/json" in script, file.name
        assert "| safe" not in text, file.name


def test_a_large_request_of_unknown_length_is_refused(site):
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        head = f"POST /api/check HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n"
        head += f"Authorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
        size = security.BODY_BYTES + 1
        raw.sendall(f"{head}{size:x}\r\n".encode() + b"x" * size)
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_a_stated_length_beyond_the_limit_is_refused_before_the_body_comes(site):
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        head = f"POST /api/check HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n"
        head += f"Authorization: Bearer {TOKEN}\r\nContent-Length: 99999999999\r\n\r\n"
        raw.sendall(head.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_given_up(site, monkeypatch):
    monkeypatch.setattr(security, "BODY_S", 0.1)
    with socket.create_connection(("127.0.0.1", site.port)) as raw:
        head = f"POST /api/check HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n"
        head += f"Authorization: Bearer {TOKEN}\r\nContent-Length: 10\r\n\r\nx"
        raw.sendall(head.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_only_json_is_read(site):
    answer = site.send("POST", "/api/check", b'{"settings": {}}', content_type="text/plain")
    assert answer.status == 400
    assert site.post("/api/check", {"settings": {}}).status == 200


@pytest.mark.parametrize(
    ("host", "header", "expected"),
    [
        ("127.0.0.1", "127.0.0.1:80", True),
        ("127.0.0.1", "[::1]:80", True),
        ("127.0.0.1", "192.168.1.5:80", False),
        ("127.0.0.1", "evil.example:80", False),
        ("127.0.0.1", "127.0.0.1.evil.example:80", False),
        ("0.0.0.0", "192.168.1.5:80", True),
        ("0.0.0.0", "evil.example:80", False),
        ("box.lan", "box.lan:80", True),
        ("box.lan", "box.lan:81", False),
    ],
)
def test_hosts_are_compared_with_their_port(host, header, expected):
    assert Access("t", 80, host).accepts_host(header) is expected
