"""The C libraries: found in the cache, or compiled there by the machine's own C compiler."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slipstream import runs
from slipstream.base.machine import read_cpu_info

FOLDER = Path(__file__).parent
SOURCES = {"rnn": ("rnn.c", "vectors.h"), "trees": ("trees.c",)}
"""The files of each library, the first of which is compiled"""
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC")
NATIVE = ("-march=native",)
COMPILE_LIMIT_S = 120.0
"""A compiler that takes longer is stopped"""


def find_compiler() -> str | None:
    """Find a C compiler that has GCC's vector types; None on Windows, whose own has not."""
    if sys.platform == "win32":
        return None
    requested = os.environ.get("CC", "").split()[:1]
    return next(filter(None, map(shutil.which, (*requested, *COMPILERS))), None)


def get_path(name: str = "rnn") -> Path:
    """Return the path of a library: one for each version of its source and each kind of
    processor."""
    cpu = read_cpu_info()
    source = b"".join((FOLDER / file).read_bytes() for file in SOURCES[name])
    key = (source, sys.platform, cpu.name, sorted(cpu.flags))
    version = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return runs.get_cache_folder() / "native" / f"{name}-{version}.so"


def build_library(name: str = "rnn") -> bool:
    """Compile a library unless it is there; return whether it can be used."""
    if find_library(name) is not None:
        return True
    path, compiler = get_path(name), find_compiler()
    if compiler is None or path in _failed:
        return False
    if not any(_compile(name, compiler, flags) for flags in (NATIVE, ())):
        _failed.add(path)
        return False
    find_library.cache_clear()
    return find_library(name) is not None


_failed: set[Path] = set()
"""Libraries that could not be compiled by this process, which does not try again"""


def _compile(name: str, compiler: str, flags: tuple[str, ...]) -> bool:
    """Compile into a temporary folder, then move the result in one step: others may do the same."""
    path, source = get_path(name), FOLDER / SOURCES[name][0]
    was_there = path.exists()  # and could not be loaded
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, *FLAGS, *flags, "-o", str(built), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_LIMIT_S)
            _publish(built, path, replace=was_there)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _publish(built: Path, path: Path, *, replace: bool) -> None:
    """Rename a library to its final name. Where another process was faster, its library stays: on a
    network file system, processes of other machines that run it would crash if it were replaced."""
    if not replace:
        try:
            path.hardlink_to(built)
            return
        except FileExistsError:
            return
        except OSError:  # a file system without links
            pass
    built.replace(path)


@cache
def find_library(name: str = "rnn") -> Any:
    """Load a library if it was built before; None if not, or if it cannot be loaded."""
    try:
        path = get_path(name)
        library = ctypes.CDLL(str(path)) if path.is_file() else None
    except OSError:
        return None
    return library


@cache
def find_threading() -> tuple[int | None, int | None]:
    """Find the functions of the OpenMP library that torch itself runs on, so that one pool of
    threads serves both: to run a function in several threads, and to number these."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            torch_library = ctypes.CDLL(str(folder / name))
            functions = torch_library.GOMP_parallel, torch_library.omp_get_thread_num
        except (OSError, AttributeError):
            continue
        run, number = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        return run, number
    return None, None
