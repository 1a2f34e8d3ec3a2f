from __future__ import annotations

import pytest
import torch

from slipstream import UserError
from slipstream.autotune import pack_size
from slipstream.autotune.rules import make_plan
from slipstream.engine.lanes import pack
from tests.conftest import small_dataset
from tests.engine.lanes.test_pack import configured, lanes_of

SHORT = {"train": {"batch": 64}, "model": {"kind": "mlp"}}


def chosen(count, **how):
    dataset = small_dataset(configured())
    some = lanes_of([{"seed": seed} for seed in range(count)], dataset, **SHORT)
    rules = make_plan(some[0].config, data_bytes=0)
    return pack_size.choose_pack_size(some, dataset.signature, dataset.memory.series, rules, **how)


def test_the_soonest_way_is_taken_and_all_evidence_kept():
    found = chosen(3)
    timed = [item for item in found.evidence if "ms" in item]
    assert {item["mode"] for item in timed} == {"together", "branches"}
    assert all(item["windows_per_s"] > 0 for item in timed)
    taken = min(timed, key=lambda item: -(-3 // item["places"]) * item["ms"])
    assert (found.mode, found.num_lanes) == (taken["mode"], taken["places"])


def test_what_does_not_fit_ends_the_doubling(monkeypatch):
    advance = pack.Pack._advance

    def small(self):
        if len(self.lanes) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        advance(self)

    monkeypatch.setattr(pack.Pack, "_advance", small)
    monkeypatch.setattr(
        pack_size, "WORTHWHILE_RATIO", 100.0
    )  # else a busy machine might end it sooner
    found = chosen(8, modes=("together",))
    assert [item["places"] for item in found.evidence] == [1, 2, 4]
    assert found.evidence[-1]["out_of_memory"]
    assert found.num_lanes <= 2


def test_without_time_the_first_that_works_is_taken():
    found = chosen(4, limit_s=0.0)
    assert (found.mode, found.num_lanes) == ("together", 1)
    assert [("skipped" in item) for item in found.evidence] == [False, True]


def test_a_model_that_cannot_be_trained_says_why(monkeypatch):
    def broken(_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(pack.Pack, "_advance", broken)
    with pytest.raises(UserError, match="no such kernel"):
        chosen(2)
