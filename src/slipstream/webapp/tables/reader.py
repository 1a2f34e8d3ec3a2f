"""A process that reads files for the server: one task a line, answered by lines of JSON.

Files of any size and content pass through here, so that the server stays small and a file that
crashes a library ends this process only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import Config
from slipstream.data.io.memory import avoid_pandas
from slipstream.errors import UserError
from slipstream.inspection.api import inspect_path
from slipstream.runs import to_json
from slipstream.webapp.tables import columns, relations, source
from slipstream.webapp.tables.cache import CachedTable


def inspect(cached: CachedTable, _: source.Report) -> dict[str, Any]:
    """Return what `slipstream inspect` finds."""
    return inspect_path(str(cached.path), cached.overrides).to_dict()


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "table": source.describe_table,
    "column": columns.build_column,
    "time": columns.build_time,
    "findings": inspect,
    "correlations": relations.correlate,
    "series": relations.find_series,
}
"""What is written to a file of the task's name, with its arguments"""


def run_task(request: dict[str, Any], report: source.Report) -> Any:
    """Carry out a task."""
    if request["task"] == "check":
        from slipstream.webapp.screens.prepare.readiness import check_data

        (values,) = request["arguments"]
        return check_data(Config.model_validate(configs.from_json_values(values)), report)
    cached = CachedTable(
        Path(request["path"]), Path(request["folder"]), tuple(request["overrides"])
    )
    if request["task"] == "rows":
        return source.read_rows(cached, *request["arguments"])
    result = TASKS[request["task"]](cached, *request["arguments"], report)
    name = "-".join([request["task"], *map(str, request["arguments"])])
    cached.write(name, json.loads(to_json(result)))
    return None


def answer(line: str, send: Callable[[Any], None]) -> None:
    """Carry out the task of a line, and send what came of it."""
    last = 0.0

    def report(share: float) -> None:
        nonlocal last
        if share >= last + 0.01:
            last = share
            send({"progress": share})

    try:
        send({"result": run_task(json.loads(line), report)})
    except UserError as error:
        send({"error": str(error)})
    except OSError as error:
        send({"error": f"{error.filename or 'the file'}: {error.strerror or error}"})
    except MemoryError:
        send({"error": "the file does not fit into memory"})


def main() -> None:
    """Answer until the server closes its end."""
    os.nice(int(sys.argv[1]))
    avoid_pandas()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply

    def send(value: Any) -> None:
        replies.write(to_json(value, indent=None) + "\n")
        replies.flush()

    for line in sys.stdin:
        try:
            answer(line, send)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
