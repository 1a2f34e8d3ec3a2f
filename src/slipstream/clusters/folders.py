"""The folder of a worker on another machine: the caller's own where both see the same file system,
else a local one whose files are sent to the caller."""

import platform
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream import runs

SEND_EVERY_S = (1.0, 10.0)
"""Between transfers, at first and in the long run; what a worker did since the last one is lost
with its node"""
PROBE = "shared-storage"
"""A file of the caller: a worker that can read it sees the same file system"""
LOCKS = ("lock.json", "lock.held")


@dataclass(frozen=True)
class FolderFiles:
    """Files of a folder: which there are, and the contents of those that have changed."""

    names: frozenset[str]
    contents: dict[str, bytes]


@dataclass(frozen=True)
class SharedProbe:
    """A file with a random text that tells whether a machine sees the caller's folders."""

    path: str
    text: str

    def is_visible(self) -> bool:
        with suppress(OSError, UnicodeDecodeError):
            return Path(self.path).read_text(encoding="utf-8") == self.text
        return False


@contextmanager
def place_probe(folder: Path) -> Iterator[SharedProbe]:
    """Write the file that shows workers whether they see this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = SharedProbe(str(folder / PROBE), uuid.uuid4().hex)
    runs.write_text(folder / PROBE, probe.text)
    try:
        yield probe
    finally:
        (folder / PROBE).unlink(missing_ok=True)


class FolderSender:
    """Remembers which files of a folder were sent, and collects those that have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sent: dict[str, tuple[int, int]] = {}

    def collect(self) -> FolderFiles | None:
        """Return the files that changed since the last call; None if none did."""
        names, changed = [], {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            is_temporary = any(part.startswith(".") for part in name.parts)
            if is_temporary or name.name in LOCKS:
                continue
            with suppress(FileNotFoundError):  # an old checkpoint is removed meanwhile
                if path.is_dir():
                    continue
                status = path.stat()
                state = (status.st_mtime_ns, status.st_size)
                if self._sent.get(name.as_posix()) != state:
                    changed[name.as_posix()] = path.read_bytes()
                    self._sent[name.as_posix()] = state
                names.append(name.as_posix())
        if not changed and set(names) == set(self._sent):
            return None
        self._sent = {name: self._sent[name] for name in names}
        return FolderFiles(frozenset(names), changed)

    def forget(self) -> None:
        self._sent = {}


def write_files(folder: Path, files: FolderFiles) -> None:
    """Make a folder equal to the one that the files are from. New files are written before old ones
    are removed, so a complete checkpoint is there at any moment."""
    for name, content in files.contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with runs.replace_atomically(path) as temporary:
            temporary.write_bytes(content)
    for path in sorted(folder.rglob("*"), reverse=True):  # the files of a folder before it
        if path.is_dir():
            with suppress(OSError):  # removes only an empty folder
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in files.names:
            path.unlink(missing_ok=True)


@contextmanager
def copy_folder(files: FolderFiles | None, send: Callable[[FolderFiles], None]) -> Iterator[Path]:
    """Yield a local folder with these files; changes are sent while it is used, and at its end."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-worker-"))
    sender = FolderSender(folder)
    ended = threading.Event()

    def send_changes() -> None:
        if changed := sender.collect():
            try:
                send(changed)
            except BaseException:
                sender.forget()  # send them again
                raise

    def repeat() -> None:
        interval_s, longest_s = SEND_EVERY_S
        while not ended.wait(interval_s):
            interval_s = min(2 * interval_s, longest_s)
            with suppress(Exception):  # the next transfer, or the last one, may succeed
                send_changes()

    thread = threading.Thread(target=repeat, name="transfer", daemon=True)
    try:
        if files is not None:
            write_files(folder, files)
        sender.collect()  # the caller has these
        thread.start()
        try:
            yield folder
        finally:
            ended.set()
            thread.join()
            send_changes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def release_locks(folder: Path, *, died: bool = False) -> None:
    """Remove the locks of workers that have ended without doing so themselves: those of other
    machines, whose command is no longer there, and of dead processes; all of one that `died`."""
    for name in LOCKS:
        for path in folder.rglob(name):
            holder = runs.find_holder(path.parent)
            if died or holder.get("host") != platform.node():
                path.unlink(missing_ok=True)
