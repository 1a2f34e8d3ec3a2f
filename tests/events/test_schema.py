"""The JSON schema of the events is that of their classes, and says what it should."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import slipstream
from slipstream import runs
from slipstream.runs.log import SCHEMA
from tests.conftest import small_config, waves
from tests.logs import read_lines
from tests.validation import find_problems

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("runs"))
    run = slipstream.train(config, waves(), quiet=True).run
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_the_schema_is_up_to_date():
    made = runpy.run_path(str(ROOT / "dev" / "events.py"))
    assert made["FILE"].read_text(encoding="utf-8") == made["schema_text"](), "run `make docs`"


def test_the_schema_is_one():
    schema = slipstream.event_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["version"] == SCHEMA == 1


def test_a_log_states_the_version_once_and_is_valid(log):
    validator = Draft202012Validator(slipstream.event_schema())
    for event in log:
        validator.validate(event)
    assert [event["event"] for event in log if "schema" in event] == ["start"]
    assert log[0]["schema"] == SCHEMA


def test_a_resumed_log_states_it_again(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    run.append(slipstream.events.Resume(step=0, differs="", spent_s=0.0))
    (event,) = runs.read_events(run)
    assert event.schema == SCHEMA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "7"}, "'7' is not of type 'integer'"),
        ({"val_loss": [1.0]}, r"\[1.0\] is not of type"),
        ({"step": None}, "None is not of type 'integer'"),
        ({"lane": 0.5}, "0.5 is not of type 'integer', 'null'"),
    ],
)
def test_an_event_with_another_type_is_invalid(log, change, message):
    epoch = next(event for event in log if event["event"] == "epoch") | change
    validator = Draft202012Validator(slipstream.event_schema())
    errors = [error.message for error in validator.iter_errors(epoch)]
    assert len(errors) == 1
    with pytest.raises(AssertionError, match=message):
        assert not errors, errors[0]


def test_an_event_that_lacks_a_field_is_invalid(log):
    epoch = dict(next(event for event in log if event["event"] == "epoch"))
    del epoch["val_loss"]
    (error,) = Draft202012Validator(slipstream.event_schema()).iter_errors(epoch)
    assert error.message == "'val_loss' is a required property"


def test_unknown_fields_and_kinds_are_valid_but_not_in_our_own_runs():
    validator = Draft202012Validator(slipstream.event_schema())
    saved = {"event": "checkpoint", "at_s": 1.0, "step": 3, "size": 7}
    later = {"event": "later", "at_s": 1.0}
    for event in (saved, later):
        validator.validate(event)
    assert find_problems(later) == ["later: is no event of the schema"]
    (problem,) = find_problems(saved)
    assert "'size' was unexpected" in problem


def test_a_search_that_resumes_is_one_that_starts():
    event = {"event": "resume", "at_s": 0.1, "space": ["train.lr"], "done": 1}
    errors = Draft202012Validator(slipstream.event_schema()).iter_errors(event)
    missing = {error.message.split("'")[1] for error in errors}
    assert missing == {"run", "trials", "parallel", "windows", "device"}


def test_a_log_of_an_earlier_version_is_read():
    line = {"event": "resume", "at_s": 0.1, "step": 4, "differs": ""}
    assert slipstream.events.parse_event(line) == slipstream.events.Resume(at_s=0.1, step=4)
    start = {"event": "start", "at_s": 0.2, "run": "a", "epochs": 3}
    assert isinstance(slipstream.events.parse_event(start), slipstream.events.Other)


def test_a_key_that_is_a_word_of_python_has_another_name():
    line = {"event": "init", "at_s": 0.1, "from": "runs/a", "matched": [], "new": [], "unused": []}
    event = slipstream.events.parse_event(line | {"columns_reordered": False})
    assert event.from_run == "runs/a"


def test_a_parsed_event_is_formatted_as_the_line_it_came_from(log):
    parsed = [slipstream.events.parse_event(line) for line in log]
    assert not [event for event in parsed if isinstance(event, slipstream.events.Other)]
    for line, event in zip(log, parsed, strict=True):
        again = slipstream.events.format_event(event)
        written = {key: value for key, value in line.items() if value is not None and key != "crc"}
        assert {key: value for key, value in again.items() if value is not None} == written
        assert next(iter(again)) == "event"


def test_an_event_is_logged_with_the_fields_that_it_has(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    run.append(slipstream.events.Recovery(what="out of memory", remedy="half", why="full"))
    run.append(slipstream.events.TrialEnd(trial=0, state="failed", value=None, params={}))
    recovery, trial = read_lines(run)
    assert list(recovery) == ["event", "at_s", "what", "remedy", "why"]
    assert recovery["event"] == "recovery"
    assert trial["value"] is None  # a field that every such event has
    assert "worker" not in trial
    unknown = {"event": "later", "at_s": 1.0, "size": 7}
    assert slipstream.events.format_event(slipstream.events.parse_event(unknown)) == unknown
