"""Start a server for a run."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import EXPORT_FILE
from slipstream.base.web_server import HEADERS_S, run_server
from slipstream.inference.portable import PortableRun, load_portable
from slipstream.inference.stream import Regime
from slipstream.server.app import PredictionServer, make_app
from slipstream.server.bodies import ServerLimits
from slipstream.server.model import ServedModel
from slipstream.server.streams import Streams, load_streams, save_streams

if TYPE_CHECKING:
    from starlette.types import ASGIApp

GRAPH = "model.onnx"
SWITCH_S = 0.0005
"""How long the event loop and the model's thread may keep each other waiting"""


def serve(
    run: Path,
    bound: socket.socket,
    *,
    token: str | None,
    limits: ServerLimits,
    ensemble: bool | None = None,
    regime: Regime = "auto",
    state: Path | None = None,
    announce: Callable[[str], None],
) -> None:
    """Serve a run's model at a bound address until SIGTERM or SIGINT.

    Streams are loaded from the file `state`, if it exists, and saved there at the end.
    """
    portable, server = _load_server(run, limits, ensemble, regime)
    used, model = server.model.regime, portable.hashes
    if (used.name == "carried") != (portable.signature.state == "carried"):
        model = model | {"regime": used.name}  # whose streams have another state
    if state is not None:
        server.streams.import_states(load_streams(state, model))
    sys.setswitchinterval(SWITCH_S)
    run_server(
        make_app(server, token),
        bound,
        lambda: announce(f"{server.model.description}; streams: {used.name}, {used.reason}"),
        headers_s=min(HEADERS_S, limits.request_s),
    )
    server.batcher.close()
    if state is not None:
        save_streams(state, server.streams.export_states(), model)


def build_app(run: Path, *, token: str | None = None, has_streams: bool = True) -> ASGIApp:
    """Return the ASGI application of a run, for servers other than Slipstream's."""
    _, server = _load_server(run, ServerLimits(), has_streams=has_streams)
    return make_app(server, token)


def _load_server(
    run: Path,
    limits: ServerLimits,
    ensemble: bool | None = None,
    regime: Regime = "auto",
    *,
    has_streams: bool = True,
) -> tuple[PortableRun, PredictionServer]:
    portable = load_portable(run, ensemble=ensemble)
    chosen = ensemble is not None  # which may be other networks than an export holds
    graph = (None if chosen else read_graph(portable)) or build_graph(portable)
    model = ServedModel(portable, graph, regime)
    return portable, PredictionServer(model, limits, Streams(limits), has_streams=has_streams)


def read_graph(run: PortableRun) -> bytes | None:
    """Return the verified graph of a run that is an export; None for any other run."""
    folder = run.run.folder
    if not (folder / EXPORT_FILE).exists() or not (folder / GRAPH).exists():
        return None
    files = runs.read_json(folder / EXPORT_FILE)["files"]
    graph = (folder / GRAPH).read_bytes()
    if hashlib.sha256(graph).hexdigest() not in [file["sha256"] for file in files]:
        raise UserError(
            f"{folder / GRAPH}: is damaged (its SHA-256 differs from {EXPORT_FILE}); export again"
        )
    return graph


def build_graph(run: PortableRun) -> bytes:
    """Return the run's graph from windows to predictions."""
    try:
        from slipstream.exporting.onnx.graph import build_window_graph
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise UserError(
            "the model is served as an ONNX graph, which needs the package onnx to build; "
            "pip install 'slipstream[onnx,serve]'"
        ) from None
    graph: bytes = build_window_graph(run).SerializeToString()
    return graph
