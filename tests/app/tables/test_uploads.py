"""Uploads over raw HTTP: sizes, speeds, names and disks."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from urllib.parse import quote

import pytest

from slipstream.app.tables import service
from slipstream.data.formats import ENDINGS
from tests.app.conftest import TOKEN

TABLE = b"a,b\n1,2\n3,4\n"
BINARY = "application/octet-stream"


def send(site, name, body=TABLE, **headers):
    headers = {"content_type": BINARY} | headers
    return site.send("POST", f"/api/data/upload?name={quote(name, safe='')}", body, **headers)


def list_uploads(site) -> list[str]:
    folder = site.workspace.folder / service.UPLOADS
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def open_upload(site, *lines: str) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", site.port))
    head = [
        "POST /api/data/upload?name=a.csv HTTP/1.1",
        f"Host: 127.0.0.1:{site.port}",
        f"Authorization: Bearer {TOKEN}",
        f"Content-Type: {BINARY}",
        *lines,
    ]
    raw.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
    raw.settimeout(30)
    return raw


def read_to_end(raw: socket.socket) -> bytes:
    """Read what the server sends until it closes the connection."""
    return b"".join(iter(lambda: raw.recv(4096), b""))


def test_an_upload_is_a_file_below_the_folder(site):
    body = TABLE + b"5,6\n" * 700_000
    assert send(site, "Löad 1.CSV", body).json == {"file": "data/Load-1.csv"}
    assert (site.workspace.folder / "data" / "Load-1.csv").read_bytes() == body


def test_nothing_is_overwritten(site):
    names = [send(site, "a.csv.gz", bytes([65 + at])).json["file"] for at in range(3)]
    assert names == ["data/a.csv.gz", "data/a-2.csv.gz", "data/a-3.csv.gz"]
    assert (site.workspace.folder / names[0]).read_bytes() == b"A"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../../etc/a.csv", "a.csv"),
        ("..\\a.csv", "a.csv"),
        (".csv", "table.csv"),
        ("...csv", "table.csv"),
        ("a\n\r\0b.csv", "a-b.csv"),
        ("<script>alert(1)</script>.csv", "script.csv"),
        ("%2e%2e%2fa.parquet", "2e-2e-2fa.parquet"),
        ("x" * 10_000 + ".csv", "x" * service.MAX_NAME + ".csv"),
        ("日本.csv", "table.csv"),
        ("a.b.csv.gz", "a.b.csv.gz"),
        ("a.zip", "a.zip"),
    ],
)
def test_names_are_made_of_plain_characters(name, expected):
    assert service.clean_name(name) == expected


@pytest.mark.parametrize("name", ["", "a", "a.py", "a.csv.exe", "a.html", ".gz", "csv", "a.csv/"])
def test_what_cannot_be_read_is_refused(site, name):
    answer = send(site, name)
    assert answer.status == 415
    assert "unsupported format" in answer.json["error"]
    assert list_uploads(site) == []


def test_every_format_that_is_read_can_be_uploaded():
    for ending in (*ENDINGS, *(f"{ending}.gz" for ending in ENDINGS), ".zip"):
        assert service.clean_name(f"a{ending}") == f"a{ending}"


def test_a_large_upload_is_refused_before_it_comes(site, monkeypatch):
    monkeypatch.setattr(service, "MAX_UPLOAD_BYTES", 1000)
    with open_upload(site, "Content-Length: 1001") as raw:
        answer = read_to_end(raw)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"at most 1,000 bytes" in answer
    assert list_uploads(site) == []


def test_a_large_upload_of_unknown_length_is_cut_off(site, monkeypatch):
    monkeypatch.setattr(service, "MAX_UPLOAD_BYTES", 1000)
    with open_upload(site, "Transfer-Encoding: chunked") as raw:
        raw.sendall(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    assert list_uploads(site) == []


def test_a_slow_upload_is_cut_off(site, monkeypatch):
    monkeypatch.setattr(service, "SLOW_S", 0.2)
    with open_upload(site, "Content-Length: 100") as raw:
        raw.sendall(b"a,b\n")
        answer = read_to_end(raw)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"too slow: 4 bytes" in answer
    assert list_uploads(site) == []


def test_an_upload_that_pauses_but_is_fast_enough_is_complete(site, monkeypatch):
    monkeypatch.setattr(service, "SLOW_S", 0.1)
    monkeypatch.setattr(service, "MIN_BYTES", 0)
    with open_upload(site, f"Content-Length: {len(TABLE)}") as raw:
        raw.sendall(TABLE[:4])
        raw.settimeout(0.35)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        raw.settimeout(30)
        raw.sendall(TABLE[4:])
        assert raw.recv(2000).startswith(b"HTTP/1.1 200")
    assert (site.workspace.folder / "data" / "a.csv").read_bytes() == TABLE


def test_an_upload_that_ends_early_leaves_nothing(site):
    with open_upload(site, "Content-Length: 100") as raw:
        raw.sendall(b"a,b\n")
    for _ in range(200):
        assert site.get("/data").status == 200
        if not list_uploads(site):
            break
    assert list_uploads(site) == []


def test_a_full_disk_is_said_before_and_during_an_upload(site, monkeypatch):
    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    limit(4096)  # the first write beyond it fails, as on a full disk
    try:
        answer = send(site, "a.csv", b"x" * 10_000)
    finally:
        limit(resource.RLIM_INFINITY)
    assert answer.status == 507
    assert list_uploads(site) == []
    monkeypatch.setattr(service, "RESERVE_BYTES", 1 << 62)
    answer = send(site, "a.csv")
    assert answer.status == 507
    assert "the disk has room for 0 bytes" in answer.json["error"]
    assert "up to" in site.get("/data").text


def test_a_folder_that_leads_out_is_not_written_to(site, tmp_path_factory):
    outside: Path = tmp_path_factory.mktemp("outside")
    (site.workspace.folder / service.UPLOADS).symlink_to(outside)
    assert send(site, "a.csv").status == 404
    assert list(outside.iterdir()) == []


def test_forms_of_other_sites_cannot_upload(site):
    assert send(site, "a.csv", content_type="text/plain").status == 415
    assert send(site, "a.csv", content_type="multipart/form-data").status == 415
    assert send(site, "a.csv", origin="http://evil.example").status == 403
    assert list_uploads(site) == []


def test_an_empty_file_is_refused(site):
    assert send(site, "a.csv", b"").status == 400
    assert list_uploads(site) == []
