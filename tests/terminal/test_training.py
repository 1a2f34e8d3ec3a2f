"""What a training prints."""

from __future__ import annotations

from slipstream.terminal.training import describe_plan

PLAN = {
    "device": "cpu",
    "precision": "fp32",
    "home": "device",
    "threads": 2,
    "cudnn": ["off", "off"],
    "micro_batch": None,
    "kernels": [],
    "hardware": {"cpu": "a CPU"},
    "reasons": dict.fromkeys(("home", "precision", "threads", "cudnn"), "a reason"),
    "evidence": [{"candidate": "cudnn = PyTorch's layers", "ms": 3.0}],
}


def test_a_plan_whose_threads_a_rule_has_chosen_has_no_speed_up():
    """Kernels were timed with one thread, but the plan as a whole was not."""
    lines = "\n".join(describe_plan(PLAN | {"ms_per_step": None}, 96, 3.0))
    assert "(a reason)" in lines
    assert "x over" not in lines
    assert "x over" in "\n".join(describe_plan(PLAN | {"ms_per_step": 1.0}, 96, 3.0))
