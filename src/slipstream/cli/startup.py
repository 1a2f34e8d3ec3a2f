"""Shortens the way to the first step, and from the last one to the prompt.

A thread imports torch while the command line is imported and the config is read, and creates the
GPU's context while the data are. At the end the process leaves without dismantling torch, which
takes up to half a second and has no effect outside of it.
"""

import atexit
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec

MIN_CORES = 4
"""From which on a process may be started that a command may not need"""
NEED_TORCH = {"train", "pretrain", "tune", "evaluate", "predict", "ensemble", "export"}
SERVER = "serve"
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Present where an NVIDIA driver is, the second one in Windows' Linux"""
_exit_code = 0


def begin(args: Sequence[str]) -> None:
    """Begin to import torch if the command needs it."""
    if not args or "--help" in args:
        return
    if args[0] in (*NEED_TORCH, SERVER):
        gc.disable()  # until all is imported: that makes up to a million objects, which stay
    if args[0] in NEED_TORCH:
        # the first to register is the last to run
        atexit.register(_leave)
        threading.Thread(target=_import_torch, daemon=True).start()
        has_gpu = any(map(os.path.exists, GPU_FILES))
        if has_gpu and find_spec("triton"):
            threading.Thread(target=_import_triton, daemon=True).start()
        if has_gpu and args[0] == "train" and (os.cpu_count() or 1) >= MIN_CORES:
            threading.Thread(target=_prepare_trees, daemon=True).start()


def _import_torch() -> None:
    with suppress(Exception):  # the command imports it as well, and reports what is wrong
        importlib.import_module("torch")


def _import_triton() -> None:
    """Import Triton and have it read its own files, which a first kernel would wait for."""
    with suppress(Exception):
        importlib.import_module("triton.runtime.cache").triton_key()


def _prepare_trees() -> None:
    """Start the process that fits the trees of the gbm baseline beside a training on a GPU."""
    with suppress(Exception):
        from slipstream.scoring import trees

        trees.prepare_process()


def prepare_device(setting: str) -> None:
    """Begin to prepare the device that `engine.device` names, as soon as torch is imported."""
    threading.Thread(target=_prepare_device, args=(setting,), daemon=True).start()


def _prepare_device(setting: str) -> None:
    with suppress(Exception):  # as above
        from slipstream import kernels
        from slipstream.base import machine

        kernels.prepare_device(machine.choose_device(setting))


@contextmanager
def record_exit_code() -> Iterator[None]:
    """Make the process end with the exit code of the commands inside."""
    global _exit_code
    try:
        yield
    except SystemExit as stop:
        _exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    except BaseException:
        _exit_code = 1
        raise


def _leave() -> None:
    """End the process after everything else that was registered for its end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_exit_code)


@contextmanager
def import_modules() -> Iterator[None]:
    """Import a command's modules without pandas and without garbage collection."""
    from slipstream.data.table import avoid_pandas

    avoid_pandas()
    yield
    retain_modules()


def retain_modules() -> None:
    """Exclude everything that exists now from later garbage collections."""
    gc.freeze()
    gc.enable()
