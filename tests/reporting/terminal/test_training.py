"""What a training prints."""

from __future__ import annotations

import pytest

from slipstream.events import Start
from slipstream.reporting.terminal.progress import TrainingDisplay, describe_plan

PLAN = {
    "device": "cpu",
    "precision": "fp32",
    "home": "device",
    "threads": 2,
    "rnn": ["slipstream", "slipstream"],
    "micro_batch": None,
    "kernels": [],
    "hardware": {"cpu": "a CPU"},
    "reasons": dict.fromkeys(("home", "precision", "threads", "rnn"), "a reason"),
    "evidence": [{"candidate": "rnn = torch", "ms": 3.0}],
}


def test_a_plan_whose_threads_a_rule_has_chosen_has_no_speed_up():
    """Kernels were timed with one thread, but the plan as a whole was not."""
    lines = "\n".join(describe_plan(PLAN | {"ms_per_step": None}, 96, 3.0))
    assert "(a reason)" in lines
    assert "x over" not in lines
    assert "x over" in "\n".join(describe_plan(PLAN | {"ms_per_step": 1.0}, 96, 3.0))


@pytest.mark.parametrize(("count", "told"), [(5, None), (6, "1 more note"), (7, "2 more notes")])
def test_notes_that_are_not_shown_are_counted(capsys, count, told):
    event = Start(
        run="a",
        plan=PLAN | {"ms_per_step": None},
        expected_s=1.0,
        series=1,
        windows={"train": 9, "val": 3, "test": 3},
        parameters=7,
        steps_per_epoch=2,
        epochs=1,
        notes=[f"remark {i}" for i in range(count)],
    )
    TrainingDisplay(quiet=False).show(event)
    lines = capsys.readouterr().err.splitlines()
    notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    assert notes == event.notes[:5] + ([f"{told} in the report"] if told else [])
