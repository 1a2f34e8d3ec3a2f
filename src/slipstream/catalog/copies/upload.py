"""Copy a run to object storage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.catalog.copies.listing import (
    LISTING,
    LOG,
    CopiedFile,
    Listing,
    read_listing,
    summarize,
)
from slipstream.catalog.copies.run_files import (
    compute_sums,
    list_names,
    read_state,
    refuse_damaged,
    refuse_running,
)
from slipstream.catalog.copies.transfer import Meter, Show, map_parallel
from slipstream.checksums import MANIFEST
from slipstream.errors import UserError
from slipstream.object_storage import BLOCK_BYTES, ObjectPath, explain_failures
from slipstream.run_names import CONFIGS, is_run

LAST = (MANIFEST, "metrics.json")
"""Sent after all other files, since they say that a run has finished"""
SAVE_S = 5.0
"""How often the list of what has arrived is written meanwhile"""


def upload(folder: Path, place: ObjectPath, show: Show | None) -> dict[str, Any]:
    if not is_run(folder):
        raise UserError(f"{folder}: is not a run folder (it holds no config.toml)")
    refuse_running(folder)
    target = place / folder.name
    states = {name: read_state(folder / name) for name in list_names(folder)}
    sums = compute_sums(folder, states)
    refuse_damaged(folder, sums)
    wanted = {name: CopiedFile(size, sums[name], at / 1e9) for name, (size, at) in states.items()}
    known = _read_known(target, _identify(folder), wanted)
    here = {file.pure.relative_to(target.pure).as_posix(): file for file in target.rglob()}
    there = {
        name: one
        for name, one in known.files.items()
        if name in here and here[name].stat().st_size == one.bytes
    }
    missing = [name for name, one in wanted.items() if not _is_same(there.get(name), one)]
    removed = [name for name in known.files if name not in wanted and name in here]
    listing = Listing(known.identity, False, {n: one for n, one in there.items() if n in wanted})
    if missing or removed or not known.complete:
        with _saving(listing, target):
            _send_files(folder, target, {name: wanted[name] for name in missing}, listing, show)
            _refuse_changed(folder, states)
            for name in removed:
                with explain_failures(target / name):
                    target.connect().delete_file((target / name).key)
            listing.complete = True
    return summarize(str(folder), str(target), wanted, missing)


def _read_known(target: ObjectPath, identity: str, wanted: dict[str, CopiedFile]) -> Listing:
    """Read what an earlier copy has sent; another run's is refused, and so is a later state."""
    known = read_listing(target)
    if known is None:
        if target.is_dir():
            raise UserError(
                f"{target}: exists, but no {LISTING} is there, so that it is no copy of this "
                "command; remove it, or copy to another place"
            )
        return Listing(identity)
    if known.identity != identity:
        raise UserError(f"{target}: is the copy of another run of this name; copy elsewhere")
    if LOG in known.files and LOG in wanted and known.files[LOG].bytes > wanted[LOG].bytes:
        raise UserError(
            f"{target}: is the copy of a later state of this run, which was resumed elsewhere; "
            f"copy it here: slipstream copy {target}"
        )
    return known


def _send_files(
    folder: Path,
    target: ObjectPath,
    files: dict[str, CopiedFile],
    listing: Listing,
    show: Show | None,
) -> None:
    """Send files, several at a time, those that mark a finished run last."""
    meter = Meter(sum(one.bytes for one in files.values()), show)
    marks = [name for name in LAST if name in files]
    others = [name for name in files if name not in marks]
    saved_at = time.monotonic()

    def send(name: str) -> str:
        _send(folder / name, target / name, meter)
        return name

    for names in (others, *([mark] for mark in marks)):
        for name in map_parallel(send, names):
            listing.files[name] = files[name]
            if time.monotonic() - saved_at > SAVE_S:
                _write_listing(target, listing)
                saved_at = time.monotonic()


def _send(path: Path, target: ObjectPath, meter: Meter) -> None:
    size = path.stat().st_size
    with explain_failures(target):
        with path.open("rb") as source, _open_output(target) as sink:
            while block := source.read(BLOCK_BYTES):
                sink.write(block)
                meter.add(len(block))
        arrived = target.connect().get_file_info(target.key).size
    if arrived != size:
        raise UserError(f"{target}: has {arrived:,} bytes instead of {size:,}; repeat the command")


def _open_output(target: ObjectPath) -> Any:
    system = target.connect()
    if target.scheme == "file":
        system.create_dir(target.parent.key, recursive=True)
    return system.open_output_stream(target.key, compression=None)


def _write_listing(target: ObjectPath, listing: Listing) -> None:
    with explain_failures(target), _open_output(target / LISTING) as sink:
        sink.write(listing.to_text().encode())


@contextmanager
def _saving(listing: Listing, target: ObjectPath) -> Iterator[None]:
    """Write the listing before and after, also where the copy is interrupted."""
    _write_listing(target, listing)
    try:
        yield
    except BaseException:
        with suppress(UserError, OSError):
            _write_listing(target, listing)
        raise
    _write_listing(target, listing)


def _refuse_changed(folder: Path, states: dict[str, tuple[int, int]]) -> None:
    refuse_running(folder)
    for name, state in states.items():
        if not (folder / name).is_file() or read_state(folder / name) != state:
            raise UserError(f"{folder / name}: changed while it was copied; repeat the command")


def _identify(folder: Path) -> str:
    """Return what tells a run from others of its name: how its log begins, which a resume keeps."""
    import hashlib

    for name in (LOG, *CONFIGS):
        with suppress(OSError), (folder / name).open("rb") as file:
            return hashlib.sha256(file.readline()).hexdigest()
    return ""


def _is_same(one: CopiedFile | None, other: CopiedFile) -> bool:
    return one is not None and (one.bytes, one.sha256) == (other.bytes, other.sha256)
