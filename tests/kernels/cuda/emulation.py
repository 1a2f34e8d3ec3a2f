"""Runs the CUDA kernels on the CPU: `emulated.cpp` compiled by the machine's own compiler, in the
place of a program that the driver runs."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import runs
from slipstream.kernels.cuda import program as programs
from slipstream.kernels.cuda import rnn

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
FILES = (HERE / "emulated.cpp", HERE / "emulator.h", programs.HEADER, rnn.SOURCE)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")
HOPPER = rnn.GpuLimits(90, 132, 232_448)


@cache
def build(macros: tuple[tuple[str, int], ...]) -> Any:
    """Compile the kernels with these macros, or find them in the cache."""
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    options += ["-U_FORTIFY_SOURCE"]  # which refuses jumps between stacks
    options += [f"-I{HERE}", f"-I{programs.FOLDER}", *(f"-D{k}={v}" for k, v in macros)]
    key = repr((options, [path.read_bytes() for path in FILES])).encode()
    path = runs.get_cache_folder() / "emulated" / f"{hashlib.sha256(key).hexdigest()[:20]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with runs.replace_atomically(path) as temporary:
            command = [str(COMPILER), *options, "-o", str(temporary), str(FILES[0])]
            subprocess.run(command, check=True, capture_output=True, text=True)
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library


class EmulatedProgram:
    """A program whose kernels run on the CPU."""

    def __init__(self, macros: Mapping[str, int]) -> None:
        self.library = build(tuple(sorted(macros.items())))

    def load(self) -> None:
        pass

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, shared: int, *arguments: Any
    ) -> None:
        values = [programs.to_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        tensors += [t for a in arguments for t in getattr(a, "tensors", ())]
        places = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        sizes = (ctypes.c_size_t * len(tensors))(*map(count_bytes, tensors))
        found = self.library.run(
            name.encode(),
            (ctypes.c_uint * 2)(*grid),
            threads,
            ctypes.c_size_t(shared),
            pointers,
            len(tensors),
            places,
            sizes,
        )
        assert not found, f"{name}: {found.decode()}"


def count_bytes(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to its last one."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextmanager
def emulate(limits: rnn.GpuLimits = HOPPER, **more: int) -> Iterator[None]:
    """Within it the CUDA kernels run on CPU tensors, as on a GPU with these limits; `more` are
    macros."""

    def get_program(_: Path, macros: Mapping[str, int], __: torch.device) -> EmulatedProgram:
        return EmulatedProgram({**macros, **more, "KERNEL": 0})

    with (
        mock.patch.object(programs, "get_program", get_program),
        mock.patch.object(rnn, "get_limits", return_value=limits),
        mock.patch.object(rnn, "explain_unusable", return_value=None),
    ):
        yield
