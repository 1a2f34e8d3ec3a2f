"""How many workers there are, and where each of them runs."""

from __future__ import annotations

import os

import pytest
import torch

from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.workers import resources
from tests.conftest import small_config


def test_each_worker_is_shown_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = small_config(engine={"device": "cuda", "threads": "auto"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resources.count_workers("auto", config) == 2
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in resources.assign_gpus(config, 3)]
    assert shown == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in resources.assign_gpus(config, 2)]
    assert shown == ["5", "7"]
    assert resources.split_cores(config, 2) == config


def test_workers_on_a_cpu_divide_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    cores = machine.count_available_cores()  # fewer where a container has a quota
    config = small_config(engine={"device": "cpu", "threads": "auto"})
    assert resources.count_workers("auto", config) == 1
    assert resources.assign_gpus(config, 2) == [{}, {}]
    assert resources.split_cores(config, 3).engine.threads == max(cores // 3, 1)
    assert resources.split_cores(config, 20).engine.threads == 1


def test_several_workers_need_data_on_disk_and_no_gpu_of_their_own():
    with pytest.raises(UserError, match="names one GPU"):
        resources.check_config(small_config(data={"path": "x"}, engine={"device": "cuda:1"}), None)
    with pytest.raises(UserError, match=r"set data\.path instead of passing a table"):
        resources.check_config(small_config(), object())
    with pytest.raises(UserError, match="workers is 0; give a number from 1"):
        resources.check_count(0)
