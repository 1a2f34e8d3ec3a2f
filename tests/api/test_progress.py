"""Progress and events while a public function runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import slipstream
from slipstream import events, runs
from slipstream.events import parse_event
from slipstream.reporting.terminal import progress
from slipstream.reporting.terminal.progress import NotebookOutput, TrainingDisplay
from slipstream.runs import Run
from tests.conftest import slow, small_config, waves


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    seen: list[events.Event] = []
    config = small_config(tmp_path_factory.mktemp("runs"))
    return slipstream.train(config, waves(), quiet=True, on_event=seen.append), seen


def test_training_shows_its_progress_unless_it_is_quiet(tmp_path, capsys):
    slipstream.train(small_config(tmp_path), waves())
    shown = capsys.readouterr()
    assert "epoch 2: training" in shown.err
    assert not shown.out
    slipstream.train(small_config(tmp_path), waves(), quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("option", "shown"), [("", "loading torch"), slow(", quiet=True", "")])
def test_the_first_prediction_says_that_torch_is_loading(option, shown):
    code = f"import slipstream as s; s.predict('absent', 'x.csv'{option})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("loading torch" in done.stderr) == bool(shown)
    assert "there is no such run folder" in done.stderr


def test_events_are_frozen_and_typed(watched):
    _, seen = watched
    kinds = {type(event) for event in seen}
    assert {events.Start, events.Step, events.Log, events.Epoch, events.TrainingEnd} <= kinds
    assert isinstance(seen[-1], events.End)
    epoch = next(event for event in seen if isinstance(event, events.Epoch))
    with pytest.raises(dataclasses.FrozenInstanceError):
        epoch.val_loss = 0.0


def test_watched_events_are_those_of_the_log(watched):
    result, seen = watched
    logged = list(runs.read_events(Run(result.run)))
    passed = [event for event in seen if not isinstance(event, events.Step)]
    assert [(type(one), one.at_s) for one in passed] == [(type(one), one.at_s) for one in logged]
    assert [one for one in passed if isinstance(one, events.Epoch)] == result.history


class Refused(Exception):
    """Of a user's function."""


def refuse_at(kind, message="no"):
    """A function that raises at the first event of a kind, and counts the calls after that."""
    calls = []

    def on_event(event):
        calls.append(event)
        if isinstance(event, kind):
            raise Refused(message)

    return on_event, calls


def get_losses(result):
    return [event.val_loss for event in result.history]


def test_an_exception_in_the_function_stops_the_run_and_saves_it(watched, tmp_path):
    on_event, calls = refuse_at(events.Epoch)
    with pytest.raises(Refused) as caught:
        slipstream.train(small_config(tmp_path), waves(), quiet=True, on_event=on_event)
    assert isinstance(calls[-1], events.Epoch)  # it is not called again
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (note,) = caught.value.__notes__
    assert note.startswith("on_event raised this; stopped")
    assert f'slipstream.train(resume="{folder}")' in note
    assert caught.value.__traceback__.tb_next is not None
    resumed = slipstream.train(data=waves(), resume=folder, quiet=True)
    whole, _ = watched
    assert get_losses(resumed) == get_losses(whole)
    assert resumed.metrics == whole.metrics


def test_an_exception_after_training_leaves_a_run_that_can_be_resumed(watched, tmp_path):
    on_event, _ = refuse_at(events.Scoring)
    with pytest.raises(Refused) as caught:
        slipstream.train(small_config(tmp_path), waves(), quiet=True, on_event=on_event)
    assert "can be resumed" in caught.value.__notes__[0]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert slipstream.train(data=waves(), resume=folder, quiet=True).metrics == watched[0].metrics


def test_an_exception_at_the_end_of_training_does_not_lose_the_result(tmp_path):
    on_event, _ = refuse_at(events.TrainingEnd)
    with pytest.raises(Refused) as caught:
        slipstream.train(small_config(tmp_path), waves(), quiet=True, on_event=on_event)
    assert "went on to its end" in caught.value.__notes__[0]
    assert slipstream.show_run(next(tmp_path.glob("*/metrics.json")).parent)["state"] == "finished"


def test_an_exception_stops_training_in_any_thread(tmp_path):
    on_event, calls = refuse_at(events.Log)
    with ThreadPoolExecutor() as threads:
        config = small_config(tmp_path, train={"epochs": 50})
        run = threads.submit(slipstream.train, config, waves(), quiet=True, on_event=on_event)
        with pytest.raises(Refused) as caught:
            run.result()
    assert "slipstream.train(resume=" in caught.value.__notes__[0]
    assert isinstance(calls[-1], events.Log)


def test_an_exception_stops_a_search_and_saves_it(tmp_path):
    on_event, _ = refuse_at(events.TrialEnd)
    tune = {"trials": 3, "retrain": 0, "space": {"train.lr": {"low": 1e-3, "high": 1e-2}}}
    with pytest.raises(Refused) as caught:
        slipstream.tune(small_config(tmp_path, tune=tune), waves(), quiet=True, on_event=on_event)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert f'slipstream.tune(resume="{folder}")' in caught.value.__notes__[0]
    study = slipstream.tune(data=waves(), resume=folder, quiet=True)
    assert len(study.history) == 3


def test_an_estimator_calls_the_function_too(tmp_path):
    seen: list[events.Event] = []
    model = slipstream.Forecaster(small_config(tmp_path), targets="a")
    assert model.fit(waves(), on_event=seen.append) is model
    assert isinstance(seen[0], events.Start)
    assert isinstance(seen[-1], events.End)


def test_an_event_of_another_version_is_passed_on_by_name():
    assert parse_event({"event": "epoch", "at_s": 1.0}) == events.Other(
        at_s=1.0, name="epoch", values={}
    )
    assert parse_event({"event": "new", "at_s": 1.0, "what": 2}).values == {"what": 2}


def test_every_event_says_what_it_is():
    for name in events.__all__:
        kind = getattr(events, name)
        if kind in (parse_event, events.format_event):
            continue
        assert dataclasses.is_dataclass(kind)
        assert not kind.__doc__.startswith(f"{name}(")  # what dataclasses would write


def test_a_notebook_shows_lines_and_one_that_changes(watched, monkeypatch):
    result, _ = watched
    shown: list[str] = []

    class Handle:
        def update(self, content, **_):
            shown.append(content["text/plain"])

    def display_content(content, **_):
        shown.append(content["text/plain"])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display_content)
    with TrainingDisplay(quiet=False, notebook=NotebookOutput()) as display:
        for event in runs.read_events(Run(result.run)):
            display.last_draw = 0.0
            display.show(event)
    assert any("steps/s" in text for text in shown)
    assert "steps/s" not in shown[-1]  # the bar is gone in the end
    assert "windows: 261 training" in shown[-1]
    assert "epoch 1: training" not in shown[-1]


def test_a_script_is_no_notebook():
    assert not progress.is_notebook()
