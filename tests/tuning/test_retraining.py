"""Retraining: every seed counts once."""

from __future__ import annotations

from slipstream import runs
from slipstream.tuning.retraining import DEFAULT, Retraining
from tests.conftest import small_config


def test_a_seed_with_a_known_result_is_not_counted_again(tmp_path):
    """Its pack may resume from a checkpoint before its end."""
    run = runs.create_run("t", out=str(tmp_path))
    entries = [(DEFAULT, small_config())]
    first = Retraining(run, small_config(), entries)
    one = first.ask()
    first.fail(one, "planted")
    assert first.reopen(one.number).is_final
    assert not first.ask().is_final
    later = Retraining(run, small_config(), entries)
    assert later.reopen(one.number).is_final
    assert len(later.results[DEFAULT].losses) == 1
