"""The event stream: complete, without repetition, also across a log that was cut."""

from __future__ import annotations

import http.client
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import runs
from slipstream.app.live import Feed
from slipstream.app.workspace import Workspace
from slipstream.events import Epoch, Log
from slipstream.runs import log as tail
from slipstream.runs.log import LOG_START, read_chunk
from tests.app.conftest import TOKEN, write_run


def read_all(log, last=LOG_START):
    """Read like a tab: events since an id, and how often it had to begin anew."""
    events, resets = [], 0
    while True:
        chunk = read_chunk(log, last)
        if chunk.is_reset:
            events, resets = [], resets + 1
        events += [event.step for event in chunk.events]
        if chunk.position == last:
            return events, resets, last
        last = chunk.position


@given(st.lists(st.sampled_from(["append", "cut", "read", "tear"]), max_size=30))
def test_a_reader_always_ends_with_what_the_log_has(tmp_path_factory, actions):
    log = tmp_path_factory.mktemp("log") / "events.jsonl"
    seen, last = [], LOG_START
    for step, action in enumerate([*actions, "append", "read"]):
        if action == "append":
            content = log.read_bytes() if log.exists() else b""
            if not content.endswith(b"\n") and content:  # as a resumed run does
                os.truncate(log, content.rfind(b"\n") + 1)
            runs.add_event(log, Log(at_s=float(step), step=step))
        elif action == "cut" and log.exists():
            lines = log.read_bytes().splitlines(keepends=True)
            log.write_bytes(b"".join(lines[: len(lines) // 2]))
        elif action == "tear" and log.exists():
            with log.open("ab") as file:
                file.write(b'{"event": "lo')
        elif action == "read":
            chunk = read_chunk(log, last)
            if chunk.is_reset:
                seen = []
            seen += [event.step for event in chunk.events]
            last = chunk.position
    complete, _, _ = read_all(log)
    assert seen == complete


def test_a_log_that_was_cut_and_grew_past_the_old_end_is_sent_anew(tmp_path):
    log = tmp_path / "events.jsonl"
    for step in range(10):
        runs.add_event(log, Log(at_s=1.0, step=step))
    _, _, last = read_all(log)
    os.truncate(log, len(log.read_bytes()) // 2)
    lines = log.read_bytes()
    log.write_bytes(lines[: lines.rfind(b"\n") + 1])
    for step in range(100, 120):
        runs.add_event(log, Log(at_s=1.0, step=step))
    events, resets, _ = read_all(log, last)
    assert resets == 1
    assert events[-1] == 119
    assert len(events) == len(set(events))


def test_a_log_in_several_messages_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "MAX_BYTES", 200)
    log = tmp_path / "events.jsonl"
    for step in range(50):
        runs.add_event(log, Log(at_s=1.0, step=step))
    assert read_all(log)[0] == list(range(50))


def test_a_feed_of_a_run_that_vanishes_says_so(tmp_path):
    folder = write_run(tmp_path, "job-1")
    feed = Feed(Workspace(tmp_path.resolve(), warm=False), "job-1", LOG_START)
    first = b"".join(feed.collect())
    assert b"event: lines" in first
    assert b'"state": "finished"' in first
    folder.rename(tmp_path / ".gone")
    feed._due.clear()
    assert b'"state": "missing"' in b"".join(feed.collect())


def test_a_feed_asks_a_running_run_for_predictions_and_passes_them_on(tmp_path):
    folder = write_run(tmp_path, "job-1", finished=False)
    feed = Feed(Workspace(tmp_path.resolve(), warm=False), "job-1", LOG_START)
    feed.collect()
    assert not runs.is_watched(folder)  # it does not run
    with runs.lock_run(runs.Run(folder)):
        feed._due.clear()
        assert b"event: preview" not in b"".join(feed.collect())
        assert runs.is_watched(folder)
        runs.write_preview(folder, {"epoch": 1.0, "series": []})
        feed._due.clear()
        assert b'event: preview\ndata: {"epoch": 1.0' in b"".join(feed.collect())
        feed._due.clear()
        assert b"event: preview" not in b"".join(feed.collect())


@pytest.mark.parametrize("text", ["{", "NaN", '{"a": NaN}', "[" * 100_000])
def test_a_damaged_preview_is_left_out(tmp_path, text):
    folder = write_run(tmp_path, "job-1")
    (folder / runs.PREVIEW).write_text(text)
    feed = Feed(Workspace(tmp_path.resolve(), warm=False), "job-1", LOG_START)
    assert b"event: preview" not in b"".join(feed.collect())


def test_a_line_break_in_a_preview_stays_in_its_message(tmp_path):
    folder = write_run(tmp_path, "job-1")
    runs.write_preview(folder, {"series": [{"name": "a\n\nevent: run\ndata: {}"}]})
    feed = Feed(Workspace(tmp_path.resolve(), warm=False), "job-1", LOG_START)
    (message,) = (one for one in feed.collect() if b"event: preview" in one)
    assert message.count(b"\n") == 3


def read_stream(site, query, count):
    """Return the messages of a stream until `count` have an id."""
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    connection.request("GET", f"/events?{query}", headers=headers)
    response = connection.getresponse()
    assert response.getheader("content-type").startswith("text/event-stream")
    messages, current = [], {}
    while sum("id" in message for message in messages) < count:
        line = response.readline().decode().rstrip("\n")
        if line:
            name, _, value = line.partition(": ")
            current[name] = value
        elif current:
            messages.append(current)
            current = {}
    response.close()
    connection.close()
    return messages


def test_a_tab_that_connects_again_gets_the_rest(site):
    folder = write_run(site.workspace.folder, "job-1", finished=False)
    first = next(one for one in read_stream(site, "run=job-1", 1) if "id" in one)
    assert [event["event"] for event in json.loads(first["data"])] == ["start", "epoch", "epoch"]
    runs.Run(folder).append(Epoch(epoch=3, step=3, train_loss=1.0, val_loss=1.0, best=True))
    rest = next(one for one in read_stream(site, f"run=job-1&last={first['id']}", 1) if "id" in one)
    assert [event["epoch"] for event in json.loads(rest["data"])] == [3]
