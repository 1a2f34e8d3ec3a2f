from __future__ import annotations

import pytest
import torch

from slipstream import UserError
from slipstream.autotune import batch_size
from tests.autotune.test_measure import made
from tests.conftest import waves


def test_a_batch_is_found_by_speed_and_by_what_fits(tmp_path):
    task, rules = made(tmp_path, table=waves(2000), model={"kind": "linear"})
    batch, evidence = batch_size.find_batch_size(task, rules)
    assert 32 <= batch <= len(task.dataset.memory.starts["train"])
    assert evidence[0]["candidate"] == "batch = 32"

    def check(_, given):
        if given[0].shape[1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    task.model.register_forward_pre_hook(check)
    batch, evidence = batch_size.find_batch_size(task, rules)
    assert batch <= 100
    assert any("failed" in item for item in evidence) or batch < 64


def test_not_even_one_window(tmp_path):
    task, rules = made(tmp_path, model={"kind": "linear"})

    def check(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    task.model.register_forward_pre_hook(check)
    with pytest.raises(UserError, match="not even one window fits"):
        batch_size.find_batch_size(task, rules)
