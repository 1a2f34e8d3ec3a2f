"""Workbooks and MATLAB objects, read in a process of their own.

The libraries that read them are written in C and Rust: a damaged file, or one that asks for more
memory than there is, ends the process that reads it. Here it ends a child. What these libraries
print becomes a note or a part of the error.

The child stays for further files. It gets a line of JSON for each, and answers with a line of JSON
and the tables as Arrow streams.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

import slipstream
from slipstream.base.errors import EmptyFileError, NoNamesError, UserError, parse_json_error
from slipstream.data.formats.reader import InputFile, ReadOptions
from slipstream.data.table import DataTable, MemoryReader, summarize_error, wrap_table

ReadFunction = Callable[[Path, str, ReadOptions], list[DataTable]]
"""A function of a module that takes a path, a name and options and returns tables"""
IDLE_S = 20.0
"""How long a child waits for the next file"""
START_S, BYTES_PER_S = 300, 200_000
"""How long a child may read a file: START_S, and more for each byte. The limit stops endless loops,
not large files"""
EXTRA_BYTES = 4 << 30
"""Address space that libraries reserve without using it"""
MAX_MESSAGES, MAX_LENGTH = 3, 200
_waiting: dict[int, list[_Child]] = {}
"""Children without a file, by the process that has started them: a fork must not talk to the
children of its parent"""
_reading: dict[int, set[_Child]] = {}
"""Children that are reading a file, by the process that has started them"""


def read_isolated(
    read: ReadFunction, file: InputFile, options: ReadOptions, *, kind: str
) -> list[DataTable]:
    """Read the tables of a file in a child process, one for each thread.

    The child imports `read` by its module and name. `kind` says what the file should be.
    """
    path = file.local_path
    request = {
        "module": read.__module__,
        "function": read.__qualname__,
        "path": str(path),
        "name": file.name,
        "options": options,
    }
    limit_s = START_S + path.stat().st_size // BYTES_PER_S
    waiting = _waiting.setdefault(os.getpid(), [])
    reading = _reading.setdefault(os.getpid(), set())
    answer = None
    for _ in range(2):  # a child may be about to end, after a while without work
        child = _take(waiting, path)
        reading.add(child)
        try:
            answer = child.read(request, limit_s)
        finally:
            reading.discard(child)
        if answer is not None:
            break
    if child.process.poll() is None:
        waiting.append(child)
    facts, tables = answer or ({"failure": "does not start"}, [])
    if "error" in facts:
        raise _parse_error(facts["error"])
    if "failure" in facts:
        raise UserError(
            f"{path}: cannot be read as {kind}: the process that reads it "
            f"{facts['failure']}; the file is damaged or needs too much memory: save it again, or "
            "export it as CSV"
        )
    return [
        wrap_table(
            table,
            details["name"],
            path=path,
            format=details["format"],
            header_lines=details["header_lines"],
            part=details["part"],
            units=details["units"],
            scalars=tuple(details["scalars"]),
            notes=tuple(details["notes"]),
        )
        for details, table in zip(facts["tables"], tables, strict=True)
    ]


def _parse_error(values: Mapping[str, Any]) -> UserError:
    """Return the error that a child sent, with what the library has printed."""
    kinds = {kind.__name__: kind for kind in (EmptyFileError, NoNamesError)}
    kind = kinds.get(values["kind"], UserError)
    error = parse_json_error(kind, values)
    if values["printed"]:
        printed = "; ".join(values["printed"])
        error = kind(error.message + f" (the library that reads it reports: {printed})")
    error.setting = values["setting"]
    return error


def _take(waiting: list[_Child], path: Path) -> _Child:
    """Return a waiting child, or start one; children that have ended meanwhile are forgotten."""
    with suppress(IndexError):
        while True:
            child = waiting.pop()
            if child.process.poll() is None:
                return child
            child.close()
    try:
        return _Child()
    except OSError as error:
        raise UserError(
            f"{path}: the process that would read it cannot be started ({error.strerror}); export "
            "the file as CSV"
        ) from None


def stop_reading() -> None:
    """End the children that read for other threads, because nobody needs their results any more."""
    for child in tuple(_reading.get(os.getpid(), ())):
        child.process.kill()


@atexit.register
def close_children() -> None:
    """End the children that wait for a file."""
    for child in _waiting.pop(os.getpid(), ()):
        child.close()


class _Child:
    """A process that reads files, one at a time."""

    def __init__(self) -> None:
        # -P: modules in the working directory are not imported
        command = (sys.executable, "-P", "-m", "slipstream.data.formats.isolated")
        paths = [str(Path(slipstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        changes = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RUST_BACKTRACE": "0"}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | changes,
        )

    def read(
        self, request: dict[str, Any], limit_s: int
    ) -> tuple[dict[str, Any], list[pa.Table]] | None:
        """Return the tables and their details; None where the child had already ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            self.process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.daemon = True
        timer.start()
        is_done = False
        printed_before = os.fstat(self.errors.fileno()).st_size
        try:
            self.process.stdin.write(json.dumps(request | {"limit_s": limit_s}).encode() + b"\n")
            self.process.stdin.flush()
            facts = json.loads(self.process.stdout.readline())
            stream = pa.PythonFile(self.process.stdout)
            tables = [pa.ipc.open_stream(stream).read_all() for _ in facts.get("tables", ())]
            is_done = True
            return facts, tables
        except (OSError, ValueError, pa.ArrowException):  # it ended before it had answered
            code = self.process.wait()
            if is_late.is_set():
                return {"failure": f"took more than {limit_s:,} s"}, []
            return ({"failure": self._describe_exit(code, printed_before)}, []) if code else None
        finally:
            timer.cancel()
            if not is_done:
                self.close()

    def _describe_exit(self, code: int, begin: int) -> str:
        """Describe how the process ended, with the first line that it has printed since `begin`."""
        from slipstream.base import machine

        self.errors.seek(begin)
        printed = self.errors.read().decode("utf-8", "replace").strip()
        return machine.describe_exit(code, printed.partition("\n")[0][:MAX_LENGTH])

    def close(self) -> None:
        """End the process, even while it reads."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        self.errors.close()


class _Messages(logging.Handler):
    """Collects the log messages of libraries."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _describe_printed(logged: Sequence[str], errors: int, begin: int) -> list[str]:
    """Return the messages that libraries have logged, or written to the file `errors` from byte
    `begin` on."""
    end = os.lseek(errors, 0, os.SEEK_END)
    os.lseek(errors, begin, os.SEEK_SET)
    printed = os.read(errors, min(end - begin, MAX_LENGTH * MAX_MESSAGES)).decode(
        "utf-8", "replace"
    )
    os.lseek(errors, 0, os.SEEK_END)
    lines = [" ".join(text.split())[:MAX_LENGTH] for text in (*logged, *printed.splitlines())]
    return list(dict.fromkeys(filter(None, lines)))[:MAX_MESSAGES]


def _limit_memory() -> None:
    """Limit the address space, so that an allocation larger than the free memory fails."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no limits, macOS not this one
        import resource

        import psutil

        from slipstream.base import machine

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = psutil.Process().memory_info().vms
        limit = used + machine.get_available_memory() + EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _carry_out(request: dict[str, Any]) -> list[DataTable]:
    values: list[Any] = [tuple(x) if isinstance(x, list) else x for x in request["options"]]
    module = importlib.import_module(request["module"])
    read: ReadFunction = getattr(module, request["function"])
    return read(Path(request["path"]), request["name"], ReadOptions(*values))


def _answer(request: dict[str, Any], messages: _Messages, replies: IO[bytes]) -> None:
    """Read a file, and send its tables or the error."""
    messages.texts.clear()
    begin = os.lseek(2, 0, os.SEEK_END)
    tables: list[DataTable] = []
    facts: dict[str, Any] = {}
    try:
        tables = _carry_out(request)
    except UserError as error:
        facts = {"error": error.to_json() | {"kind": type(error).__name__}}
        facts["error"]["setting"] = error.setting
    except MemoryError:
        facts = {"failure": "needs more memory than there is"}
    except BaseException as error:  # a panic in Rust is none of the usual ones
        facts = {"failure": f"failed: {summarize_error(error)}"}
    printed = _describe_printed(messages.texts, 2, begin)
    if "error" in facts:
        facts["error"]["printed"] = printed
    notes = [f"the library that reads the file reports: {text}" for text in printed]
    if not facts:
        facts["tables"] = [_describe_table(table, notes) for table in tables]
    replies.write(json.dumps(facts).encode() + b"\n")
    for table in tables:
        assert isinstance(table.reader, MemoryReader)
        rows = pa.table(table.reader.columns)
        with pa.ipc.new_stream(replies, rows.schema) as stream:
            stream.write_table(rows)
    replies.flush()


def _describe_table(table: DataTable, notes: list[str]) -> dict[str, Any]:
    (file,) = table.files
    return {
        "name": file.name,
        "format": file.format,
        "header_lines": file.header_lines,
        "part": file.part,
        "units": dict(file.units),
        "scalars": file.scalars,
        "notes": [*file.notes, *notes],
    }


def main() -> None:
    """Answer requests until the parent closes its end, or sends none for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    messages = _Messages()
    logging.getLogger().addHandler(messages)
    with suppress(OSError):  # only Linux has it: should memory run out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    while True:
        timer = threading.Timer(IDLE_S, os._exit, (0,))
        timer.start()
        line = sys.stdin.readline()
        timer.cancel()
        if not line:
            return
        request = json.loads(line)
        if hasattr(signal, "alarm"):  # where the parent was killed, nobody else ends a loop
            signal.alarm(request["limit_s"] + 1)
        _limit_memory()
        try:
            _answer(request, messages, replies)
        except BrokenPipeError:
            return
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
