"""Start a server for a run."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import UserError
from slipstream.portable.model import PortableRun, load_portable
from slipstream.serving.app import PredictionServer, make_app
from slipstream.serving.limits import ServerLimits
from slipstream.serving.model import ServedModel
from slipstream.serving.server import run_server
from slipstream.serving.streams.files import load_streams, save_streams
from slipstream.serving.streams.registry import Streams


def serve(
    run: Path,
    bound: socket.socket,
    *,
    token: str | None,
    limits: ServerLimits,
    ensemble: bool | None = None,
    state: Path | None = None,
    announce: Callable[[str], None],
) -> None:
    """Serve a run's model at a bound address until SIGTERM or SIGINT.

    Streams are loaded from the file `state`, if it exists, and saved there at the end.
    """
    portable = load_portable(run, ensemble=ensemble)
    model = ServedModel(portable, build_graph(portable))
    streams = Streams(model.reader.start, limits)
    if state is not None:
        streams.import_states(load_streams(state, portable.hashes))
    server = PredictionServer(model, limits, streams)
    run_server(make_app(server, token), bound, lambda: announce(model.description))
    server.batcher.close()
    if state is not None:
        save_streams(state, streams.export_states(), portable.hashes)


def build_graph(run: PortableRun) -> bytes:
    """Return the run's graph from windows to predictions."""
    try:
        from slipstream.exporting.onnx.model import build_window_graph
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise UserError(
            "the model is served as an ONNX graph, which needs the package onnx to build; "
            "pip install 'slipstream[onnx,serve]'"
        ) from None
    graph: bytes = build_window_graph(run).SerializeToString()
    return graph
