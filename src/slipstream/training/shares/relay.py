"""Events of shares as events of their run: with the run's lane numbers, each of them once.

A worker that was killed trains the steps since its checkpoint again, and reports them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slipstream import runs
from slipstream.runs import Event, Run
from slipstream.training.shares.division import Division, get_share

OF_LANES = ("log", "epoch", "exploit", "lane", "recovery")
OF_WORKERS = ("fallback", "thaw", "review", "cache")
LEFT_OUT = ("event", "at_s", "opened_at", "crc")
Key = tuple[Any, ...]


class EventRelay:
    """Logs the events of shares in the run, and remembers how each of them trains."""

    def __init__(self, run: Run, division: Division, done: Iterable[int] = ()) -> None:
        """`done`: the shares that were trained before."""
        self.run, self.division = run, division
        self._num_done = sum(len(division.shares[share]) for share in done)
        self.starts: dict[int, Event] = {}
        """By share: how it trains"""
        self._known = {key for event in runs.read_events(run) for key in _list_keys(event)}
        self._is_announced = False

    def add(self, share: int, event: Event) -> None:
        """Log an event of a share, or show it, unless that was done before."""
        kind = event["event"]
        if kind == "start":
            self._start(share, event)
        elif kind in OF_LANES:
            self._add_new(renumber(event, self.division.shares[share], share))
            if kind == "epoch" and share == 0:
                self._show_predictions()
        elif kind in OF_WORKERS:
            self._add_new(event | {"worker": share})
        elif kind == "init":  # the same for all
            self._add_new(event)
        elif kind == "monitor":
            self.run.append(kind, **_strip(event), worker=share)
        elif kind == "trouble":
            self.run.warn(event["what"])

    def announce(self) -> None:
        """Announce a run whose shares were trained by others, if its log has no start yet."""
        if any(event["event"] == "start" for event in runs.read_events(self.run)):
            return
        for share in range(len(self.division.shares)):
            for event in runs.read_events(get_share(self.run, share)):
                if event["event"] == "start":
                    self._start(share, event)
                    return

    def _show_predictions(self) -> None:
        """Have whoever looks at the run see what a model of the first share predicts."""
        share = get_share(self.run, 0).folder
        if not runs.is_watched(self.run.folder):
            return
        runs.mark_watched(share)
        if (share / runs.PREVIEW).exists():
            preview = runs.read_json(share / runs.PREVIEW)
            preview["lane"] = self.division.shares[0][preview["lane"]]
            runs.write_preview(self.run.folder, preview)

    def _add_new(self, event: Event) -> None:
        left = drop_known(event, self._known)
        if left is not None:
            self._known |= set(_list_keys(left))
            self.run.append(left["event"], **_strip(left))

    def _start(self, share: int, event: Event) -> None:
        """Announce the run as soon as one share knows its plan, with the lanes of all."""
        self.starts[share] = event
        if self._is_announced:
            return
        self._is_announced = True
        shares, pack = self.division.shares, event["pack"]
        most = pack["places"] if pack["places"] < pack["lanes"] else self.division.num_lanes
        pack = pack | {
            "lanes": self.division.num_lanes,
            "places": sum(min(len(one), most) for one in shares),
            "done": self.division.num_lanes - sum(map(len, shares)) + self._num_done + pack["done"],
            "workers": len(shares),
            "shares": shares,
        }
        if self.division.on is not None:
            pack["on"] = self.division.on
        plan = self.division.complete_plan(event["plan"])
        threads = {"threads": f"for each of {len(shares)} workers"}
        plan = plan | {"reasons": plan["reasons"] | threads}
        values = _strip(event) | {"run": str(self.run.folder), "pack": pack, "plan": plan}
        runs.write_json(self.run.folder / "plan.json", plan | {"pack": pack})
        self.run.append("start", **values)


def renumber(event: Event, numbers: Sequence[int], share: int) -> Event:
    """Return an event of a share with the numbers that its lanes have in the run."""
    changed: dict[str, Any] = {"worker": share}
    if "lane" in event:
        changed["lane"] = numbers[event["lane"]]
    if "losses" in event:
        changed["losses"] = {numbers[int(lane)]: loss for lane, loss in event["losses"].items()}
    return event | changed


def _strip(event: Event) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in LEFT_OUT}


def _list_keys(event: Event) -> list[Key]:
    """Return what tells an event from others: a loss for each lane."""
    kind = event["event"]
    if kind == "log" and "losses" in event:
        return [(kind, int(lane), event["step"]) for lane in event["losses"]]
    if kind in OF_LANES and "lane" in event:
        return [(kind, event["lane"], event.get("step"), event.get("remedy"))]
    if kind == "init":
        return [(kind,)]
    if kind in (*OF_LANES, *OF_WORKERS) and "worker" in event:
        return [
            (kind, event["worker"], *(str(event.get(key)) for key in ("what", "why", "remedy")))
        ]
    return []


def drop_known(event: Event, known: set[Key]) -> Event | None:
    """Return an event without the losses that are known; None where nothing is left."""
    new = [key for key in _list_keys(event) if key not in known]
    if not new:
        return None
    if event["event"] != "log":
        return event
    lanes = {lane for _, lane, _ in new}
    return event | {"losses": {n: loss for n, loss in event["losses"].items() if int(n) in lanes}}


def rebuild_log(run: Run, division: Division, saved: Iterable[tuple[int, int]]) -> None:
    """Give the run's log what its shares have logged up to their checkpoints, no more and no less.

    `saved` has the length of each share's log there. The run may have heard less, if it was killed
    before its workers, or more, if a worker was killed after it had sent it.
    """
    events: list[Event] = []
    for share, log_bytes in saved:
        of_share = get_share(run, share)
        runs.truncate_log(of_share, log_bytes)
        numbers = division.shares[share]
        events += [
            renumber(event, numbers, share)
            for event in runs.read_events(of_share)
            if event["event"] in OF_LANES
        ]
    right = {key for event in events for key in _list_keys(event)}
    head, tail = split_log(run, division.log_bytes)
    retained, known = [], {key for event in head for key in _list_keys(event)}
    for event in tail:
        keys = _list_keys(event)
        is_of_lanes = event["event"] in OF_LANES and bool(keys)
        if is_of_lanes and not set(keys) <= right:
            left = drop_known(event, set(keys) - right)
            if left is None:
                continue
            event = left
        known |= set(_list_keys(event))
        retained.append(event)
    at_s = max((event["at_s"] for event in retained), default=0.0)
    for event in events:
        missing = drop_known(event, known)
        if missing is not None:
            known |= set(_list_keys(missing))
            retained.append(missing | {"at_s": at_s})
    if retained != tail:
        with runs.replace_atomically(run.log) as temporary:
            for event in (*head, *retained):
                runs.add_event(temporary, event)


def split_log(run: Run, size: int) -> tuple[list[Event], list[Event]]:
    """Return the events in the first bytes of a log, and those after them."""
    try:
        content = run.log.read_bytes()
    except FileNotFoundError:
        return [], []
    parts = (content[:size], content[size:])
    parsed = [[runs.parse_line(line) for line in part.split(b"\n")[:-1]] for part in parts]
    head, tail = ([event for event in part if event is not None] for part in parsed)
    return head, tail
