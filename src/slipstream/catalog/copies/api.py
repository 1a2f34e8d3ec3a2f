"""Copy runs to object storage and back, each file verified by its SHA-256 sum.

A repeated command sends only what is missing or has changed.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.catalog.copies.download import download
from slipstream.catalog.copies.transfer import Show
from slipstream.catalog.copies.upload import upload
from slipstream.errors import UserError
from slipstream.object_storage import ObjectPath, is_url, parse_path
from slipstream.run_names import OUT, find_run
from slipstream.text.passwords import mask_url


def copy_run(
    run: str | PathLike[str], to: str | PathLike[str] = OUT, *, show: Show | None = None
) -> dict[str, Any]:
    """Copy a run to object storage, or from there to a folder.

    Every file is verified by its SHA-256 sum. A repeated copy sends only what has changed, and an
    interrupted one is repeated. A run that is training is refused; one that has stopped is copied
    with its checkpoints, and can be resumed where the copy is.

    Args:
        run: A run, or the URL of a copy, such as s3://bucket/runs/job-20260131T120000Z.
        to: The destination of the run's folder: a URL, such as s3://bucket/runs, or a folder of
            runs on this machine.
        show: A function that is called with the bytes copied so far and the bytes in total.

    Returns:
        A dict: `run`, `to`, `files` and `bytes` of the whole run, and `copied_files` and
        `copied_bytes` of what was sent.

    Raises:
        UserError: There is no such run, it is training or damaged, another run of its name is
            there, or the storage cannot be reached.

    Example:
        slipstream.copy_run("last", "s3://bucket/runs")
        slipstream.copy_run("s3://bucket/runs/job-20260131T120000Z", "runs")
    """
    for text in map(str, (run, to)):
        if "://" in text and not is_url(text):
            raise UserError(f"{mask_url(text)}: runs are copied to and from s3://, gs:// and az://")
    if is_url(run) == is_url(to):
        where = "object storage" if is_url(to) else "this machine"
        raise UserError(
            f"{run} and {to} are both on {where}; copy from a folder to a URL such as "
            "s3://bucket/runs, or the other way round"
        )
    if is_url(to):
        return upload(find_run(Path(run)).resolve(), _parse_url(to), show)
    return download(_parse_url(run), Path(to), show)


def _parse_url(text: str | PathLike[str]) -> ObjectPath:
    path = parse_path(text)
    assert isinstance(path, ObjectPath)
    return path
