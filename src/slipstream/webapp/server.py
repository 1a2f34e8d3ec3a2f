"""Starts the app: binds the address, prints its URL, opens the browser."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import webbrowser
from pathlib import Path

from slipstream.errors import UserError
from slipstream.web_server import bind, format_url, is_loopback, run_server
from slipstream.webapp.app import create_app, supervise
from slipstream.webapp.jobs import presence
from slipstream.webapp.security import Access
from slipstream.webapp.workspace import Workspace

STOP_S = 3
"""How long requests may take after a signal; jobs are processes of their own"""


def serve(workspace: Workspace, *, host: str, port: int, browser: bool) -> None:
    """Serve a folder until SIGTERM or SIGINT; jobs go on."""
    bound = bind(host, port)
    access = Access(secrets.token_urlsafe(24), bound.getsockname()[1], host)
    if not is_loopback(host):
        warn_about_network(host)
    url = f"{format_url(bound)}/?token={access.token}"
    os.chdir(workspace.folder)  # paths in configs are relative to it, as for the commands
    app = create_app(workspace, access)
    state = app.app.state  # type: ignore[attr-defined]
    tasks = set()

    def announce() -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        tasks.add(asyncio.get_running_loop().create_task(supervise(workspace)))
        if browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    def stop() -> None:
        state.stopping = True

    presence_file = announce_presence(workspace.folder, workspace.store.root)
    threading.Thread(target=_read_ahead, args=(workspace,), daemon=True).start()
    try:
        run_server(app, bound, announce, stop=stop, stop_s=STOP_S)
    finally:
        presence_file.unlink(missing_ok=True)


def _read_ahead(workspace: Workspace) -> None:
    """Read the runs before the first page asks for them."""
    path = workspace.store.root / "rows.json"
    workspace.rows.load(path)
    workspace.rows.list(workspace.folder, workspace.places)
    workspace.rows.save(path)


def announce_presence(folder: Path, root: Path) -> Path:
    try:
        return presence.announce_server(root)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); the app keeps its jobs there"
        ) from None


def warn_about_network(host: str) -> None:
    """Say what another address than loopback means."""
    sys.stderr.write(
        f"slipstream: warning: {host} can be reached from the network, without encryption. Whoever "
        "has the URL with its token can read the folder's runs and data and start jobs on this "
        "machine; do not pass it on, and prefer an SSH tunnel to 127.0.0.1.\n"
    )
