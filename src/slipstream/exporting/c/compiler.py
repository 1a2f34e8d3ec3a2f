"""The machine's C compiler: builds an exported model and runs it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError

COMPILERS = ("cc", "gcc", "clang")
ARM_COMPILER = "arm-none-eabi-gcc"
FLAGS = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic")
ARM_FLAGS = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
SECTIONS = ("-ffunction-sections", "-fdata-sections")
COMPILE_LIMIT_S = 300.0
Values = npt.NDArray[Any]


def find_compiler() -> str:
    """Find a C compiler, by the variable CC first; without one, nothing can be verified."""
    requested = os.environ.get("CC", "").split()[:1]
    for name in (*requested, *COMPILERS):
        if path := shutil.which(name):
            return path
    raise UserError(
        "there is no C compiler (cc, gcc or clang) to verify the C code with, so it is not "
        "written; install one, or name it in the variable CC"
    )


def run_tool(command: Sequence[str]) -> str:
    """Run a compiler and return what it prints; its messages are the error's."""
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S
        )
    except subprocess.CalledProcessError as error:
        raise UserError(f"{command[0]} cannot compile the C code: {error.stderr.strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]} does not run: {error}") from None
    return done.stdout


def build_library(source: Path, to: Path) -> Path:
    """Compile a model's source into a shared library."""
    run_tool([find_compiler(), *FLAGS, "-shared", "-fPIC", "-o", str(to), str(source), "-lm"])
    return to


def build_program(sources: Sequence[Path], to: Path) -> Path:
    """Compile a program."""
    run_tool([find_compiler(), *FLAGS, "-o", str(to), *map(str, sources), "-lm"])
    return to


def measure_arm(source: Path) -> dict[str, int]:
    """Return the bytes of code and constants, and of RAM, on a Cortex-M4F; nothing where there is
    no compiler for it."""
    if not all(map(shutil.which, (ARM_COMPILER, "arm-none-eabi-size"))):
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model.o"
        flags = [*FLAGS, *ARM_FLAGS, *SECTIONS]
        run_tool([ARM_COMPILER, *flags, "-c", "-o", str(built), str(source)])
        numbers = run_tool(["arm-none-eabi-size", str(built)]).splitlines()[1].split()
    text, data, bss = map(int, numbers[:3])
    return {"cortex_m4_flash_bytes": text + data, "cortex_m4_ram_bytes": data + bss}


class CLibrary:
    """A compiled model, called from Python. Shapes: N windows or rows."""

    def __init__(self, path: Path, name: str, dtype: npt.DTypeLike, *, num_outputs: int) -> None:
        self._library = ctypes.CDLL(str(path))
        self._name, self._num_outputs = name, num_outputs
        self._dtype = np.dtype("float64" if dtype == "double" else "float32")

    def predict(self, rows: Values, *extra: Values) -> Values:
        """Predict windows [N, context, inputs], each by itself, to [N, outputs]; `extra` are
        constants [N, ...] and rows ahead [N, ...] where the model reads them."""
        return self.window(rows, *extra)[0]

    def window(self, rows: Values, *extra: Values) -> tuple[Values, npt.NDArray[np.int32]]:
        """Return predictions of windows, and what each call returned."""
        out = self._make_out(len(rows), self._num_outputs)
        results = self._call_each("window", [*map(self._convert, (rows, *extra)), out])
        return out, results

    def predict_by_steps(self, rows: Values, *extra: Values) -> Values:
        """Predict windows row by row, each from a reset on; NaN where a step says there is none."""
        result = self._make_out(len(rows), self._num_outputs)
        for number, window in enumerate(rows):
            self.reset()
            beside = [np.repeat(one[number : number + 1], len(window), axis=0) for one in extra]
            out, complete = self.step(window, *beside)
            if complete[-1]:
                result[number] = out[-1]
        return result

    def bound(self, out: Values, level: str, *, num: int) -> tuple[Values, Values]:
        """Return both ends of the intervals around predictions [N, outputs]."""
        lower, upper = self._make_out(len(out), num), self._make_out(len(out), num)
        self._call_each(f"interval_{level}", [out, lower, upper])
        return lower, upper

    def reset(self) -> None:
        """Start a series."""
        getattr(self._library, f"{self._name}_reset")()

    def step(self, rows: Values, *extra: Values) -> tuple[Values, npt.NDArray[np.int32]]:
        """Take rows [N, columns] one by one; return predictions and what each step returned."""
        out = self._make_out(len(rows), self._num_outputs)
        results = self._call_each("step", [*map(self._convert, (rows, *extra)), out])
        return out, results

    def prepare(self, rows: Values, num_inputs: int, *, state_bytes: int) -> Values:
        """Prepare the rows [N, columns] of a series."""
        state = ctypes.create_string_buffer(state_bytes)
        reset = getattr(self._library, f"{self._name}_reset_state")
        reset.argtypes = [ctypes.c_void_p]
        reset(ctypes.addressof(state))
        out = self._make_out(len(rows), num_inputs)
        self._call_each("prepare_state", [self._convert(rows), out], ctypes.addressof(state))
        return out

    def _convert(self, values: Values) -> Values:
        return np.ascontiguousarray(values, dtype=self._dtype)

    def _make_out(self, count: int, width: int) -> Values:
        return np.full((count, width), np.nan, dtype=self._dtype)

    def _call_each(
        self, function: str, arrays: Sequence[Values], *first: int
    ) -> npt.NDArray[np.int32]:
        """Call a function for each entry of the arrays, after arguments that stay the same."""
        call = getattr(self._library, f"{self._name}_{function}")
        call.argtypes = [ctypes.c_void_p] * (len(first) + len(arrays))
        call.restype = ctypes.c_int
        places = [(one.ctypes.data, one[:1].nbytes) for one in arrays]
        results = np.zeros(len(arrays[0]), dtype=np.int32)
        for number in range(len(results)):
            results[number] = call(*first, *(begin + number * size for begin, size in places))
        return results
