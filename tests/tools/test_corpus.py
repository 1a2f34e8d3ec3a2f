"""`inspect` against a corpus of awkward tables: it proposes the right settings, or asks."""

from __future__ import annotations

import pytest

from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.data.dataset import load_dataset
from slipstream.tools.inspection import Findings, inspect_path
from tests.tools.corpus import CASES, Case


def list_differences(case: Case, found: Findings) -> list[str]:
    """List where the proposal differs from what a careful person would write."""
    data, time = found.proposal.data, found.to_dict()["time"] or {}
    wrong = [
        f"data.{name} is {data.get(name)!r}, not {value!r}"
        for name, value in case.data.items()
        if data.get(name) != value
    ]
    if case.step is not None and time.get("step") != pytest.approx(case.step):
        wrong.append(f"the step is {time.get('step')}, not {case.step}")
    if case.gaps is not None and time.get("gaps") != case.gaps:
        wrong.append(f"{time.get('gaps')} gaps, not {case.gaps}")
    inputs = set(data.get("inputs", ())) - set(data.get("targets", ()))
    if case.inputs is not None and inputs != case.inputs:
        wrong.append(f"inputs are {sorted(inputs)}")
    if inputs & case.not_inputs:
        wrong.append(f"{sorted(inputs & case.not_inputs)} are inputs")
    return wrong


def test_the_corpus_is_large_enough():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_table_of_the_corpus(case, tmp_path):
    found = inspect_path(str(case.write(tmp_path)))
    questions = [doubt.name for doubt in found.proposal.doubts]
    config = configs.load(found.proposal.config)
    if case.asks is not None:
        assert case.asks in questions
        with pytest.raises(UserError, match=r"data\.undecided"):
            load_dataset(config)
        return
    assert not questions
    assert not list_differences(case, found)
    assert load_dataset(config).num_windows["train"] > 0
