"""The streams of a server in a file, from its graceful stop to its next start."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import runs
from slipstream.errors import UserError
from slipstream.serving.streams.rows import StreamState

VERSION = 1
HEADER = "streams.json"


def save_streams(path: Path, states: Mapping[str, StreamState], hashes: Mapping[str, str]) -> None:
    """Write all streams; `hashes` are those of the model's files."""
    streams = [
        {"id": name, "rows": state.num_rows, "missing_rows": state.missing_rows}
        for name, state in states.items()
    ]
    header = {"version": VERSION, "model": dict(hashes), "streams": streams}
    try:
        with (
            runs.replace_atomically(path) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        ):
            archive.writestr(HEADER, json.dumps(header))
            for number, state in enumerate(states.values()):
                for name, array in state.arrays.items():
                    archive.writestr(f"{number}/{name}", _to_bytes(array))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def load_streams(path: Path, hashes: Mapping[str, str]) -> dict[str, StreamState]:
    """Read the streams of a file; there are none where it does not exist."""
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; create it first")
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(HEADER))
            if header["version"] != VERSION or header["model"] != dict(hashes):
                raise UserError(
                    f"{path}: its streams are of another model; name another file for the state, "
                    "or remove this one"
                )
            arrays: dict[str, dict[str, Any]] = {}
            for inner in archive.namelist():
                number, _, name = inner.partition("/")
                if name:
                    content = io.BytesIO(archive.read(inner))
                    arrays.setdefault(number, {})[name] = np.load(content, allow_pickle=False)
            return {
                one["id"]: StreamState(one["rows"], one["missing_rows"], arrays[str(number)])
                for number, one in enumerate(header["streams"])
            }
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is no file of streams, or is damaged ({error})") from None


def _to_bytes(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()
