"""Object storage by fsspec-style addresses, and the sums of files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from slipstream.base.errors import Command, StorageError, Text, UserError

URL = re.compile(r"(?P<scheme>s3|gs|gcs|az|abfs|abfss|file):/+(?P<rest>.*)", re.DOTALL)
"""A path in object storage; `pathlib` makes one slash of two. `file://` is a folder of this machine
that is read in the same way"""
CANONICAL = {"gcs": "gs", "abfs": "az", "abfss": "az"}
WILDCARD = re.compile(r"[*?[]")
CONNECT_S, REQUEST_S, ATTEMPTS = 5.0, 15.0, 3
"""The timeouts of a connection and of a request, and the number of attempts"""
BLOCK_BYTES, PARALLEL = 8 << 20, 8
"""The size of one request, and the number of parallel requests"""
NO_ACCESS = re.compile(
    r"ACCESS_DENIED|Access ?Denied|InvalidAccessKeyId|INVALID_ACCESS_KEY|SIGNATURE|TOKEN|Forbidden|"
    r"INVALID_CLIENT|EXPIRED|PERMISSION_DENIED|UNAUTHENTICATED|Unauthorized|credential|\b40[13]\b",
    re.IGNORECASE,
)
NO_CONNECTION = re.compile(
    r"NETWORK_CONNECTION|curl|resolve host|connect|timed? ?out|UNAVAILABLE|REQUEST_TIMEOUT",
    re.IGNORECASE,
)
SIGNED = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")
"""An address whose query may hold a token of access"""
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file",
    "az": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    "file": "check the permissions",
}
ENDPOINTS = {
    "s3": "check the network, AWS_ENDPOINT_URL and AWS_REGION",
    "gs": "check the network and GOOGLE_APPLICATION_CREDENTIALS",
    "az": "check the network and AZURE_STORAGE_ACCOUNT",
    "file": "check the disk",
}


class ObjectStatus(NamedTuple):
    """The size and time of an object, which change when it is replaced; named as in
    `os.stat_result`."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class ObjectPath:
    """An object, or a folder of objects. It can be sent to worker processes, which open connections
    of their own."""

    scheme: str
    key: str
    """Bucket and name, without a slash at either end but the first one of `file://`"""
    status: ObjectStatus | None = field(default=None, compare=False)
    """The status from the listing of a folder; None for other paths"""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    @property
    def pure(self) -> PurePosixPath:
        return PurePosixPath(self.key)

    @property
    def name(self) -> str:
        return self.pure.name

    @property
    def stem(self) -> str:
        return self.pure.stem

    @property
    def suffix(self) -> str:
        return self.pure.suffix

    @property
    def suffixes(self) -> list[str]:
        return self.pure.suffixes

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.scheme, str(self.pure.parent))

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, str(self.pure / name))

    def with_suffix(self, suffix: str) -> ObjectPath:
        return ObjectPath(self.scheme, str(self.pure.with_suffix(suffix)))

    def resolve(self) -> ObjectPath:
        return self

    def is_dir(self) -> bool:
        return self.status is None and self._look_up().type.name == "Directory"

    def is_file(self) -> bool:
        return self.status is not None or self._look_up().is_file

    def exists(self) -> bool:
        return self.status is not None or self._look_up().type.name != "NotFound"

    def stat(self) -> ObjectStatus:
        """Return the size and time from the listing, or else the current ones."""
        if self.status is not None:
            return self.status
        info = self._look_up()
        if not info.is_file:
            raise FileNotFoundError(str(self))
        return ObjectStatus(info.size, info.mtime_ns or 0)

    def _look_up(self) -> Any:
        with explain_failures(self):
            return self.connect().get_file_info(self.key)

    def rglob(self, _: str = "*") -> list[ObjectPath]:
        """List every object below this folder, with its size and time."""
        from pyarrow.fs import FileSelector

        with explain_failures(self):
            selector = FileSelector(self.key, recursive=True, allow_not_found=True)
            infos = self.connect().get_file_info(selector)
        return [
            ObjectPath(self.scheme, info.path, ObjectStatus(info.size, info.mtime_ns or 0))
            for info in infos
            if info.is_file
        ]

    def iterdir(self) -> list[ObjectPath]:
        """List the objects and folders directly below this folder."""
        from pyarrow.fs import FileSelector

        with explain_failures(self):
            infos = self.connect().get_file_info(FileSelector(self.key, allow_not_found=True))
        return [ObjectPath(self.scheme, info.path) for info in infos]

    def find_matches(self) -> tuple[ObjectPath, list[ObjectPath]]:
        """Return the folder that a pattern begins with, and the paths below it that match, by
        name."""
        parts = self.pure.parts
        first = next((i for i, part in enumerate(parts) if WILDCARD.search(part)), None)
        if first is None:
            return self, []
        folder = ObjectPath(self.scheme, str(PurePosixPath(*parts[:first])))
        below = sorted(folder.rglob(), key=to_pure)
        names = [name_below(file, folder).parts for file in below]
        return folder, [
            file for file, found in zip(below, names, strict=True) if _matches(found, parts[first:])
        ]

    def open(self, mode: str = "rb") -> Any:
        """Open an object for reading anywhere; each read is a request."""
        assert mode == "rb"
        with explain_failures(self):
            return self.connect().open_input_file(self.key)

    def pin(self) -> ObjectPath:
        """Return the path with its current status; `open_unchanged` refuses an object that differs
        from it."""
        return ObjectPath(self.scheme, self.key, self.stat())

    def open_unchanged(self) -> Any:
        """Open an object that has to be the one that was listed."""
        if self.status is not None and self.status != ObjectPath(self.scheme, self.key).stat():
            raise UserError(f"{self}: was replaced since the data were read; start again")
        return self.open()

    def open_stream(self) -> Any:
        """Open an object for reading from its beginning, in large blocks."""
        with explain_failures(self):
            return self.connect().open_input_stream(
                self.key, compression=None, buffer_size=BLOCK_BYTES
            )

    def download(self, target: Path) -> None:
        """Write an object to a file, block by block, several at a time."""
        from concurrent.futures import ThreadPoolExecutor  # takes 5 ms

        size, lock = self.stat().st_size, threading.Lock()
        with self.open() as source, target.open("wb") as file:

            def copy_block(offset: int) -> None:
                with explain_failures(self):
                    block = source.read_at(min(BLOCK_BYTES, size - offset), offset)
                with lock:
                    file.seek(offset)
                    file.write(block)

            with ThreadPoolExecutor(PARALLEL) as pool:
                for _ in pool.map(copy_block, range(0, size, BLOCK_BYTES)):
                    pass
        if target.stat().st_size != size:
            raise UserError(f"{self}: changed while it was read; repeat the command")

    def connect(self) -> Any:
        """Return the file system of this storage, one per process."""
        return _connect(self.scheme, self.key.partition("/")[0], os.getpid())


AnyPath = Path | ObjectPath


def to_pure(path: AnyPath) -> PurePath:
    """Return the path without its scheme, by which files are sorted."""
    return path if isinstance(path, Path) else path.pure


def name_below(file: AnyPath, folder: AnyPath) -> PurePath:
    """Return a file's path below a folder."""
    return to_pure(file).relative_to(to_pure(folder))


def is_url(text: object) -> bool:
    """Return whether a path is one in object storage."""
    return isinstance(text, (str, os.PathLike)) and bool(URL.match(str(text)))


def parse_path(text: str | os.PathLike[str]) -> AnyPath:
    """Return a path of this machine or one in object storage; credentials in it are refused."""
    match = URL.match(os.fspath(text))
    if match is None:
        return Path(text)
    scheme, location = CANONICAL.get(match["scheme"], match["scheme"]), match["rest"].rstrip("/")
    bucket, slash, name = location.partition("/")
    user, separator, host = bucket.rpartition("@")
    if (
        separator and scheme == "az" and ":" not in user
    ):  # abfs://container@account.dfs.core.windows.net
        raise UserError(
            f"{match[0]}: write az://{user}{slash}{name}, and set AZURE_STORAGE_ACCOUNT to "
            f"{host.partition('.')[0]}"
        )
    if separator:
        where = f"{scheme}://***@{host}{slash}{name}"
        raise UserError(
            f"{where}: a path with credentials is refused, since it is written to configs and "
            f"logs; {CREDENTIALS[scheme]}, and take them out of the path"
        )
    if scheme == "file":
        return ObjectPath(scheme, f"/{location}")
    if not bucket:
        raise UserError(f"{match[0]}: names no bucket; write {scheme}://BUCKET/FOLDER/FILE")
    return ObjectPath(scheme, location)


def refuse_url(
    text: str | os.PathLike[str], problem: str, fix: Text, command: Command | None = None
) -> None:
    """Refuse a path in object storage where only one of this machine works; `fix` ends before the
    path, or before a command that takes it."""
    if is_url(text):
        url = parse_path(text)
        raise UserError(
            f"{url}: {problem}", fix=fix + " " + (command.take(url) if command else f"{url}")
        )


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether the parts of a name match those of a pattern, `**` any number of them."""
    if not patterns or not names:
        return not names and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _matches(names, patterns[1:]) or _matches(names[1:], patterns)
    return fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


@cache
def _connect(scheme: str, bucket: str, _: int) -> Any:
    """Open the file system of a bucket. A fork must not use the connections of its parent, so the
    process's id is part of the key."""
    from pyarrow import fs

    with explain_failures(ObjectPath(scheme, bucket)):
        match scheme:
            case "s3":
                return fs.S3FileSystem(**_configure_s3(bucket))
            case "gs":
                return fs.GcsFileSystem(**_configure_gcs())
            case "az":
                return fs.AzureFileSystem(**_configure_azure(bucket))
            case _:
                return fs.LocalFileSystem()


def _configure_s3(bucket: str) -> dict[str, Any]:
    """Return the options of Amazon's storage and of compatible ones. Arrow takes credentials from
    the environment and from profiles, but no endpoint."""
    from pyarrow import fs

    options: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "request_timeout": REQUEST_S,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    }
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        scheme, separator, host = endpoint.rstrip("/").rpartition("://")
        if "@" in host:
            raise UserError("AWS_ENDPOINT_URL contains credentials; take them out of it")
        options |= {"endpoint_override": host, "region": region or "us-east-1"}
        options |= {"scheme": scheme} if separator else {}
    elif region:
        options["region"] = region
    else:
        with suppress(OSError):  # not reachable, which the first request says
            options["region"] = fs.resolve_s3_region(bucket)
    return options


def _configure_gcs() -> dict[str, Any]:
    """Return the options of Google's storage, or of an emulator, which takes no credentials."""
    from datetime import timedelta

    options: dict[str, Any] = {"retry_time_limit": timedelta(seconds=REQUEST_S)}
    if endpoint := os.environ.get("STORAGE_EMULATOR_HOST"):
        scheme, separator, host = endpoint.rstrip("/").rpartition("://")
        options |= {"anonymous": True, "endpoint_override": host}
        options["scheme"] = scheme if separator else "http"
    return options


def _configure_azure(container: str) -> dict[str, Any]:
    """Return the account of a container, and its key; without one, Arrow takes AZURE_CLIENT_ID and
    others, a managed identity, or the login of the command line."""
    account = _read_first("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise UserError(
            f"az://{container}: which storage account is not known; set AZURE_STORAGE_ACCOUNT"
        )
    key = _read_first("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
    token = None if key else _read_first("AZURE_STORAGE_SAS_TOKEN")
    if token:  # Arrow appends it to the address as it is
        token = f"?{token.removeprefix('?')}"
    return {"account_name": account, "account_key": key, "sas_token": token}


def _read_first(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@contextmanager
def explain_failures(path: ObjectPath) -> Iterator[None]:
    """Turn Arrow's errors about an object into a UserError with the path and the fix."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise explain(path, error) from None


def explain(path: ObjectPath, error: Exception) -> StorageError:
    """Return the error that explains why an object cannot be read or written."""
    reason = re.sub(r"\s+", " ", str(error)).strip()
    reason = re.sub(r"^When .*?: (?=AWS Error)", "", reason)
    reason = SIGNED.sub(r"\1", reason)[:300]
    if re.search(r"NO_SUCH_BUCKET|NoSuchBucket|bucket does not exist", reason):
        return StorageError(f"{path}: there is no such bucket; check its name")
    if NO_CONNECTION.search(reason):
        return StorageError(f"{path}: cannot be reached ({reason}); {ENDPOINTS[path.scheme]}")
    if NO_ACCESS.search(reason):
        return StorageError(f"{path}: access is denied ({reason}); {CREDENTIALS[path.scheme]}")
    return StorageError(f"{path}: {reason}")


MANIFEST = "manifest.json"
END_BYTES = 1 << 16
"""The number of bytes compared at each end of two files; files that differ there need not be read
as a whole"""


def read_verified(folder: Path) -> dict[str, bytes]:
    """Return a folder's files, each verified against the manifest; a UserError names a damaged one.

    Callers parse the returned bytes, not the file itself, which may change afterwards.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is missing; was the run finished?")
    sums = _read_manifest(folder / MANIFEST)
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(present - set(sums)):
        raise UserError(f"{folder / name}: is not in the manifest; it was added later")
    files = {}
    for name, expected in sums.items():
        if name not in present:
            raise UserError(f"{folder / name}: is missing")
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise UserError(f"{folder / name}: is damaged (its SHA-256 differs from the manifest)")
    return files


def compute_sha256(path: AnyPath) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(manifest: Path) -> dict[str, str]:
    try:
        sums = json.loads(manifest.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{manifest}: is missing; was the run finished?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{manifest}: cannot be read as JSON ({error})") from None
    if not isinstance(sums, dict) or not sums:
        raise UserError(f"{manifest}: lists no files")
    return sums


def group_by_content(paths: Iterable[AnyPath]) -> list[list[AnyPath]]:
    """Group the files that hold the same bytes; cheap comparisons come first."""
    groups = [list(paths)]
    for compute in (lambda path: path.stat().st_size, _hash_ends, compute_sha256):
        finer: dict[tuple[int, object], list[AnyPath]] = {}
        for number, group in enumerate(groups):
            for path in group:
                finer.setdefault((number, compute(path)), []).append(path)
        groups = [group for group in finer.values() if len(group) > 1]
    return groups


def _hash_ends(path: AnyPath) -> bytes:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(path.stat().st_size - END_BYTES, 0))
        digest.update(file.read())
    return digest.digest()
