from __future__ import annotations

import platform

import torch

from slipstream import __version__
from slipstream.base import machine


def test_a_description_names_every_version():
    description = machine.describe(torch.device("cpu"))
    assert description["slipstream"] == __version__
    assert description["torch"] == torch.__version__
    assert description["python"] == platform.python_version()
    assert description["cpu"]
    assert "triton" in description


def test_a_hint_goes_by_the_name_of_the_gpu():
    assert machine.find_gpu_hint("NVIDIA GeForce RTX 2080 Ti").half == "fp16"
    assert machine.find_gpu_hint("NVIDIA H200").half == "bf16"
    assert machine.find_gpu_hint("GeForce 256") is None
