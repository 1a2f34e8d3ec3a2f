"""Uploads: streamed to a file below the folder, under a name of ours, within limits."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import time
import unicodedata
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from slipstream.errors import UserError
from slipstream.webapp.paths import PACKED, TABLES, resolve_below

MOST_BYTES = 8 << 30
RESERVE_BYTES = 512 << 20
"""Of the disk that uploads leave free"""
SLOW_S, FEWEST_BYTES = 30.0, 64 << 10
"""In every so many seconds, at least so many bytes have to arrive"""
MOST_UPLOADS = 4
"""At the same time"""
WRITE_BYTES = 1 << 20
MOST_NAME = 80
PLACE = "data"
"""The folder of uploads, below that of the app"""
PART = ".upload-"
STALE_S = 3600.0


class UploadError(UserError):
    """An upload that is not taken, with the status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def find_limit(folder: Path) -> int:
    """Return how many bytes an upload may have now."""
    return max(min(MOST_BYTES, shutil.disk_usage(folder).free - RESERVE_BYTES), 0)


def clean_name(name: str) -> str:
    """Return a name for an upload, of plain characters; its ending must be one that is read."""
    last = re.split(r"[/\\]", name)[-1]
    plain = unicodedata.normalize("NFKD", last).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", plain)
    lower, ending = plain.lower(), ""
    for packed in PACKED:
        if lower.endswith(packed):
            ending = packed
            lower = lower.removesuffix(packed)
    inner = next((one for one in sorted(TABLES, key=len, reverse=True) if lower.endswith(one)), "")
    if not inner and ending != ".zip":
        text = Path(last[-100:]).suffix or last[-100:]
        known = ", ".join((*TABLES, *PACKED))
        raise UploadError(415, f'unsupported format "{text}"; use {known}')
    stem = lower.removesuffix(inner)
    stem = plain[: len(stem)].strip("._-")[:MOST_NAME].strip("._-") or "table"
    return f"{stem}{inner}{ending}"


class Uploads:
    """Takes uploads for a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    async def receive(self, name: str, size: int | None, chunks: AsyncIterator[bytes]) -> str:
        """Write an upload; return its path below the folder. What is cut off leaves nothing."""
        name = clean_name(name)
        if self._count >= MOST_UPLOADS:
            raise UploadError(429, f"{MOST_UPLOADS} uploads are under way; wait for one to end")
        limit = find_limit(self.folder)
        if size is not None and size > limit:
            raise _refuse(size, limit)
        self._count += 1
        try:
            place = resolve_below(self.folder, PLACE)
            place.mkdir(exist_ok=True)
            _remove_stale(place)
            part = place / f"{PART}{secrets.token_hex(8)}"
            try:
                await _write(part, chunks, limit)
                target = await asyncio.to_thread(_publish, part, place, name)
            finally:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
        finally:
            self._count -= 1
        return f"{PLACE}/{target.name}"


def _refuse(size: int, limit: int) -> UploadError:
    if limit < MOST_BYTES:
        return UploadError(
            507, f"the file has {_format(size)}, but the disk has room for {_format(limit)} more"
        )
    return UploadError(
        413,
        f"the file has {_format(size)} or more; an upload has at most {_format(limit)}. Copy "
        "larger files into the folder instead",
    )


def _format(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size:,} bytes"


async def _write(path: Path, chunks: AsyncIterator[bytes], limit: int) -> None:
    """Write what arrives, while it arrives fast enough and is not too much."""
    total, pending = 0, bytearray()
    with path.open("xb") as file:
        async for chunk in _watch_speed(chunks):
            total += len(chunk)
            if total > limit:
                raise _refuse(total, limit)
            pending += chunk
            if len(pending) >= WRITE_BYTES:
                await asyncio.to_thread(file.write, pending)
                pending = bytearray()
        await asyncio.to_thread(file.write, pending)
    if not total:
        raise UploadError(400, "the file is empty")


async def _watch_speed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks for as long as enough bytes arrive."""
    begin, count = time.monotonic(), 0
    arrival: asyncio.Future[bytes] | None = None
    try:
        while True:
            arrival = arrival or asyncio.ensure_future(anext(chunks, b""))
            await asyncio.wait([arrival], timeout=begin + SLOW_S - time.monotonic())
            if arrival.done():
                chunk, arrival = arrival.result(), None
                if not chunk:
                    return
                count += len(chunk)
                yield chunk
            if time.monotonic() - begin >= SLOW_S:
                if count < FEWEST_BYTES:
                    slow = f"the upload was too slow: {count:,} bytes in {SLOW_S:g} s"
                    raise UploadError(408, slow)
                begin, count = time.monotonic(), 0
    finally:
        if arrival is not None:
            arrival.cancel()


def _publish(part: Path, place: Path, name: str) -> Path:
    """Give a finished upload its name, or the next one that is free."""
    stem, dot, endings = name.partition(".")
    number = 1
    while True:
        target = place / (name if number == 1 else f"{stem}-{number}{dot}{endings}")
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            number += 1
            continue
        part.replace(target)
        return target


def _remove_stale(place: Path) -> None:
    """Remove what servers left that were killed during an upload."""
    for path in place.glob(f"{PART}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
