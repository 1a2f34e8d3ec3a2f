"""Programs in CUDA C++: compiled by NVRTC, kept on disk, loaded and launched through the driver.

NVRTC is a library that comes with PyTorch's CUDA wheels; neither nvcc nor a header is needed. A
program is a source file with its macros, which compiles in about a second. Compiled code is kept in
the cache folder under a name made of source, macros, GPU and compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream import runs

FOLDER = Path(__file__).parent
HEADER = FOLDER / "device.cuh"
MAX_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has no context yet"""
SUM_BYTES = 32


class CudaProgramError(RuntimeError):
    """A program does not compile, load or start."""


def list_libraries() -> list[str]:
    """List the names and paths under which NVRTC may be found, the likeliest first."""
    major = (torch.version.cuda or "13").split(".")[0]
    site = Path(torch.__file__).parents[1]
    if sys.platform == "win32":
        folders = [Path(torch.__file__).parent / "lib", *site.glob("nvidia/*/bin/**/")]
        names = ("nvrtc64_*0.dll",)
    else:
        folders = [*site.glob("nvidia/*/lib"), Path(torch.__file__).parent / "lib"]
        folders += [Path("/usr/local/cuda/lib64")]
        names = (f"libnvrtc.so.{major}", "libnvrtc.so.*", "libnvrtc-*.so*")
    found = [path for name in names for folder in folders for path in sorted(folder.glob(name))]
    own = [f"libnvrtc.so.{major}", *map(str, found)]
    return [name for name in dict.fromkeys(own) if "builtins" not in name and ".alt." not in name]


@cache
def find_compiler() -> Any:
    """Load NVRTC; None where there is none."""
    for name in list_libraries():
        try:
            # which NVRTC looks for by its name alone
            for builtins in Path(name).parent.glob("*nvrtc-builtins*") if "/" in name else ():
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def find_driver() -> Any:
    """Load the driver's library; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


@cache
def get_compiler_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_compiler(find_compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def list_architectures() -> list[int]:
    """List the GPUs that NVRTC makes machine code for, as 75 for compute capability 7.5."""
    count = ctypes.c_int()
    _check_compiler(find_compiler().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    found = (ctypes.c_int * count.value)()
    _check_compiler(find_compiler().nvrtcGetSupportedArchs(found))
    return list(found)


@dataclass(frozen=True)
class Source:
    """A source file with its macros, for one kind of GPU."""

    path: Path
    macros: tuple[tuple[str, int], ...]
    architecture: int
    """As 75 for compute capability 7.5"""
    as_ptx: bool = False
    """PTX, which the driver compiles when it loads it, instead of machine code"""

    def list_options(self) -> list[str]:
        kind = "compute" if self.as_ptx else "sm"
        options = [f"--gpu-architecture={kind}_{self.architecture}", "--std=c++17"]
        return options + [f"-D{name}={value}" for name, value in self.macros]

    def read(self) -> str:
        # the header first: NVRTC has no file system
        header = HEADER.read_text(encoding="utf-8").replace("#pragma once", "")
        return header + self.path.read_text(encoding="utf-8")

    def get_cache_path(self) -> Path:
        key = (self.read(), self.list_options(), get_compiler_version())
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        return runs.get_cache_folder() / "cuda" / f"{self.path.stem}-{name}.bin"


def compile_source(source: Source, more_options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Return the code of a source, and the compiler's log."""
    compiler, program = find_compiler(), ctypes.c_void_p()
    text, name = source.read().encode(), source.path.name.encode()
    _check_compiler(compiler.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        options = [option.encode() for option in (*source.list_options(), *more_options)]
        array = (ctypes.c_char_p * len(options))(*options)
        code = compiler.nvrtcCompileProgram(program, len(options), array)
        log = _read_result(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if code:
            raise CudaProgramError(f"{source.path.name} does not compile: {log.strip()[:2000]}")
        return _read_result(program, "PTX" if source.as_ptx else "CUBIN"), log
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _read_result(program: ctypes.c_void_p, name: str) -> bytes:
    compiler, size = find_compiler(), ctypes.c_size_t()
    _check_compiler(getattr(compiler, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    result = ctypes.create_string_buffer(size.value)
    _check_compiler(getattr(compiler, f"nvrtcGet{name}")(program, result))
    return result.raw


def load_code(source: Source) -> bytes:
    """Return the code of a source: from the cache where it is there and undamaged."""
    path = source.get_cache_path()
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[SUM_BYTES:]).digest() == content[:SUM_BYTES]:
            return content[SUM_BYTES:]
    except OSError:
        pass
    code, _ = compile_source(source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with runs.replace_atomically(path) as temporary:
            temporary.write_bytes(hashlib.sha256(code).digest() + code)
    except OSError:  # a cache that cannot be written: it is compiled again next time
        pass
    return code


def _check_compiler(code: int) -> None:
    if code:
        raise CudaProgramError(f"NVRTC failed with error {code}")


def _check_driver(code: int, what: str) -> None:
    if not code:
        return
    text = ctypes.c_char_p()
    find_driver().cuGetErrorString(code, ctypes.byref(text))
    message = (text.value or b"unknown error").decode(errors="replace")
    raise CudaProgramError(f"{what}: {message} ({code})")


def _call_driver(name: str, what: str, *arguments: Any) -> None:
    """Call a function of the driver, in PyTorch's context of the current device."""
    function = getattr(find_driver(), name)
    code = function(*arguments)
    if code == NO_CONTEXT:
        torch.cuda.set_device(torch.cuda.current_device())
        context = ctypes.c_void_p()
        driver, device = find_driver(), torch.cuda.current_device()
        _check_driver(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), what)
        _check_driver(driver.cuCtxSetCurrent(context), what)
        code = function(*arguments)
    _check_driver(code, what)


@dataclass
class Program:
    """The kernels of one source on one GPU."""

    source: Source
    device: int
    _module: ctypes.c_void_p | None = None
    _kernels: dict[tuple[str, int], ctypes.c_void_p] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> None:
        """Compile the program, unless that was done before, and bring it onto the GPU."""
        with self._lock:
            if self._module is None:
                code, module = load_code(self.source), ctypes.c_void_p()
                _call_driver("cuModuleLoadData", self.source.path.name, ctypes.byref(module), code)
                self._module = module

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, shared: int, *arguments: Any
    ) -> None:
        """Start a kernel on PyTorch's current stream: tensors are passed as pointers (None: null),
        ints as 32 bits, anything else as it is."""
        kernel = self._find_kernel(name, shared)
        values = [to_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (*grid, 1, threads, 1, 1, shared)
        _call_driver("cuLaunchKernel", name, kernel, *sizes, stream, pointers, None)

    def _find_kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        known = self._kernels.get((name, shared))
        if known is not None:
            return known
        self.load()
        kernel = ctypes.c_void_p()
        _call_driver("cuModuleGetFunction", name, ctypes.byref(kernel), self._module, name.encode())
        _call_driver("cuFuncSetAttribute", name, kernel, MAX_SHARED, shared)
        self._kernels[name, shared] = kernel
        return kernel


def to_argument(argument: Any) -> Any:
    """Return an argument of a kernel as a value of ctypes."""
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return argument


_programs: dict[tuple[Source, int], Program] = {}


def get_program(path: Path, macros: Mapping[str, int], device: torch.device) -> Program:
    """Return a program for a GPU; the same object each time."""
    source = Source(path, tuple(sorted(macros.items())), get_architecture(device))
    if source.architecture not in list_architectures():
        older = [known for known in list_architectures() if known <= source.architecture]
        source = Source(path, source.macros, max(older, default=75), as_ptx=True)
    number = torch.cuda.current_device() if device.index is None else device.index
    return _programs.setdefault((source, number), Program(source, number))


def get_architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
