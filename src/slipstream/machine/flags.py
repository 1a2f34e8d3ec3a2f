"""The one place that sets torch's global flags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def set_flags(
    *,
    threads: int,
    tf32: bool,
    onednn: bool = True,
    cudnn_benchmark: bool = False,
    deterministic: bool = False,
) -> Iterator[None]:
    """Set torch's global flags for one run and restore them afterwards."""
    # typed as Any: torch sets these through module attributes that its annotations leave out
    matmul: Any = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn
    mkldnn: Any = torch.backends.mkldnn
    cudnn: Any = torch.backends.cudnn
    before = matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, cudnn.benchmark
    before_threads = torch.get_num_threads()
    deterministic = deterministic and not torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads)
        matmul.fp32_precision = rnn.fp32_precision = "tf32" if tf32 else "ieee"
        mkldnn.enabled, cudnn.benchmark = onednn, cudnn_benchmark
        if deterministic:  # torch imports its compiler even to set False
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before_threads)
        matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, cudnn.benchmark = before
