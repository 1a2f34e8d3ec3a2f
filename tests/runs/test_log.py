from __future__ import annotations

import json
import random

import pytest

from slipstream import runs
from slipstream.events import Log, Other


@pytest.fixture
def run(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    for step in range(3):
        run.append(Other(name="later", values={"step": step, "loss": 0.5, "name": "ü"}))
    return run


def test_a_flipped_bit_costs_its_line_and_is_noted(run):
    whole, wanted, draw = run.log.read_bytes(), list(runs.read_events(run)), random.Random(0)
    for _ in range(500):
        bad = bytearray(whole)
        place = draw.randrange(len(bad))
        bad[place] ^= 1 << draw.randrange(8)
        run.log.write_bytes(bad)
        events, notes = runs.read_log(run)
        assert all(event in wanted or _same_but_for_its_sum(event, wanted) for event in events)
        assert len(events) >= 1
        if len(events) < 3:
            assert notes


def _same_but_for_its_sum(event, wanted):
    """A flip in the name of the sum leaves a line as version 0.1 wrote it, with one key more."""
    return any(
        (known.name, known.at_s) == (event.name, event.at_s)
        and known.values.items() <= event.values.items()
        and len(event.values) == len(known.values) + 1
        for known in wanted
    )


def test_a_torn_last_line_is_dropped_with_a_note(run):
    run.log.write_bytes(run.log.read_bytes()[:-9])
    events, notes = runs.read_log(run)
    assert [event.values["step"] for event in events] == [0, 1]
    assert len(notes) == 1
    assert "the last line" in notes[0]


def test_what_follows_a_torn_line_is_not_lost_with_it(run):
    run.log.write_bytes(run.log.read_bytes()[:-9])
    with runs.lock_run(run):
        run.append(Log(step=7))
    *earlier, last = runs.read_events(run)
    assert [event.values["step"] for event in earlier] == [0, 1]
    assert last.step == 7


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b"null", b"{}", b'{"event": "log"}', b'{"event": 3, "at_s": 1}', b"\xff"]
)
def test_lines_that_are_no_events_are_left_out(run, line):
    run.log.write_bytes(line + b"\n" + run.log.read_bytes())
    events, notes = runs.read_log(run)
    assert [event.values["step"] for event in events] == [0, 1, 2]
    assert "1 damaged lines (1)" in notes[0]


def test_logs_of_version_0_1_are_read(run):
    old = {"event": "log", "at_s": 1.5, "step": 9}
    run.log.write_text(json.dumps(old) + "\n")
    assert runs.read_log(run) == ([Log(at_s=1.5, step=9)], [])


def test_trailing_nuls_are_left_out(run):
    run.log.write_bytes(run.log.read_bytes() + b"\0" * 40)
    events, notes = runs.read_log(run)
    assert len(events) == 3
    assert notes
