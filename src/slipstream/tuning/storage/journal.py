"""The file of a study that one process searches: Optuna's journal, a line for each operation.

Every line carries a checksum, which Optuna passes over. Before a file is opened again it is read
here: what was cut off at its end is dropped, and where a line within is damaged, the file is
written anew from the other lines and from what the log of the search knows of finished trials.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalOperation as Op
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.study import StudyDirection
from optuna.trial import TrialState

from slipstream import runs
from slipstream.errors import UserError
from slipstream.runs import Event

Log = dict[str, Any]
SUM, NUMBER = "sum", "number"
"""Keys of our own: a line's checksum, and the number of a trial that is one line"""
NOTES = "slipstream"
"""The user attribute that holds what we know of a trial"""
LOST = "its settings were lost with a damaged line of study.log"
STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
EPOCH = "1970-01-01T00:00:00+00:00"
"""For times that are lost"""


class ChecksummedJournal(JournalFileBackend):
    """Optuna's file, with a checksum in each line."""

    def append_logs(self, logs: list[Log]) -> None:
        super().append_logs([add_checksum(log) for log in logs])


def add_checksum(log: Mapping[str, Any]) -> Log:
    """The operation with the checksum of all else that its line says."""
    return {**log, SUM: _sum_of(log)}


def _sum_of(log: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in log.items() if key != SUM}
    return f"{zlib.crc32(json.dumps(rest, separators=(',', ':')).encode()):08x}"


def repair(
    path: Path,
    *,
    study: str,
    distributions: Mapping[str, BaseDistribution],
    events: Iterable[Event],
) -> list[str]:
    """Leave a file that Optuna reads to its end; what was wrong with it, a sentence each.

    Whoever calls this holds the run's lock, so that a lock of Optuna's is of a process that died.
    """
    Path(f"{path}.lock").unlink(missing_ok=True)
    known = _finished(events)
    content = path.read_bytes() if path.exists() else b""
    logs = _logs(content)
    whole = [log for log in logs if log is not None]
    if None not in logs[:-1] and _is_sound(whole, known):
        if len(whole) == len(logs) == content.count(b"\n"):
            return []
        _replace(path, content, whole)
        return [f"{path}: {_trouble(content, logs)}; the damaged file is {_aside(path).name}"]
    rebuilt = _rebuilt(logs, study, distributions, known)
    if not _is_sound(rebuilt, {}):
        raise UserError(
            f"{path}: is damaged beyond repair; restore it from a copy, or start a new search (the "
            f"finished trials are in {path.with_name('events.jsonl')})"
        )
    _replace(path, content, rebuilt)
    count = logs.count(None)
    return [
        f"{path}: {count or 'some'} damaged stretch{'es' if count > 1 else ''}; written anew from "
        f"the other lines and events.jsonl, the damaged file is {_aside(path).name}"
    ]


def _trouble(content: bytes, logs: Sequence[Log | None]) -> str:
    if content.endswith(b"\n") and logs[-1] is not None:
        return "a break between two lines was damaged, and nothing is lost"
    return "its end was cut off or damaged, and the last operation is done again"


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _replace(path: Path, content: bytes, logs: Sequence[Log]) -> None:
    """Write the file anew, beside a copy of what it was."""
    if content:
        with runs.replace_atomically(_aside(path)) as temporary:
            temporary.write_bytes(content)
    lines = (json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
    runs.write_text(path, "".join(lines))


def _logs(content: bytes) -> list[Log | None]:
    """Every operation; None for a stretch that is damaged."""
    found: list[Log | None] = []
    for line in content.split(b"\n"):
        for log in _logs_of(line.decode(errors="replace")) if line else []:
            if log is not None or not found or found[-1] is not None:
                found.append(log)
    return found


def _logs_of(line: str) -> list[Log | None]:
    """Mostly one; two where the break between them was damaged."""
    starts = [match.start() for match in re.finditer(r'\{"op_code"', line)]
    if len(starts) < 2:
        return [_checked(line)]
    ends = [*starts[1:], len(line) + 1]
    pieces = [line[a : b - 1] for a, b in zip(starts, ends, strict=True)]
    return [_checked(piece) for piece in pieces]


def _checked(text: str) -> Log | None:
    try:
        log = json.loads(text)
    except ValueError:
        return None
    known = isinstance(log, dict) and log.get("op_code") in list(Op)
    return log if known and log.get(SUM) in (None, _sum_of(log)) else None


def _is_sound(logs: Sequence[Log], known: Mapping[int, Event]) -> bool:
    """Whether Optuna takes these operations, and has every trial that is known to be finished."""
    replayed = JournalStorageReplayResult("")
    try:
        replayed.apply_logs(logs)
        trials = replayed.get_all_trials(0, None) if logs else []
    except Exception:  # of whatever kind: Optuna expects no damage
        return False
    done = {trial.number for trial in trials if trial.state.is_finished()}
    return done >= set(known)


def _finished(events: Iterable[Event]) -> dict[int, Event]:
    """What the search's log says of trials that have ended, by their number."""
    found = {}
    for event in events:
        number = event.get("trial")
        if event.get("event") == "trial" and isinstance(number, int) and number >= 0:
            value = event.get("value")
            scored = isinstance(value, float) or event.get("state") != "finished"
            if event.get("state") in STATES and isinstance(event.get("params"), dict) and scored:
                found[number] = event
    return found


@dataclass
class TrialRecord:
    """What is known of one trial."""

    params: dict[str, float] = field(default_factory=dict)
    """As Optuna has them inside"""
    distributions: dict[str, str] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    state: TrialState = TrialState.RUNNING
    value: float | None = None
    start: str | None = None
    end: str | None = None

    def take(self, log: Log) -> None:
        """One operation on it."""
        match log["op_code"]:
            case Op.SET_TRIAL_PARAM:
                self.params[log["param_name"]] = log["param_value_internal"]
                self.distributions[log["param_name"]] = log["distribution"]
            case Op.SET_TRIAL_STATE_VALUES:
                self.state, self.end = TrialState(log["state"]), log.get("datetime_complete")
                self.value = log["values"][0] if log["values"] else None
            case Op.SET_TRIAL_INTERMEDIATE_VALUE:
                self.losses[str(log["step"])] = log["intermediate_value"]
            case Op.SET_TRIAL_USER_ATTR:
                self.user |= log["user_attr"]
            case Op.SET_TRIAL_SYSTEM_ATTR:
                self.system |= log["system_attr"]
            case Op.CREATE_TRIAL:
                self._begin(log)

    def _begin(self, log: Log) -> None:
        self.start = log["datetime_start"]
        self.params |= log.get("params", {})
        self.distributions |= log.get("distributions", {})
        self.losses |= log.get("intermediate_values", {})
        self.user |= log.get("user_attrs", {})
        self.system |= log.get("system_attrs", {})
        self.state = TrialState(log.get("state", self.state))
        self.value, self.end = log.get("value"), log.get("datetime_complete")

    def learn(self, event: Event, distributions: Mapping[str, BaseDistribution]) -> None:
        """Add what is missing, from what the search's log says of its end."""
        for name, value in event["params"].items():
            if name in distributions and name not in self.params:
                try:
                    self.params[name] = distributions[name].to_internal_repr(value)
                except ValueError:
                    continue
                self.distributions[name] = distribution_to_json(distributions[name])
        if not self.state.is_finished():
            self.state, self.value = STATES[event["state"]], event.get("value")
        notes = {key: event[key] for key in event.keys() - {"event", "at_s", "trial", "params"}}
        self.user.setdefault(NOTES, {k: v for k, v in notes.items() if k not in ("state", "value")})

    def to_log(self, number: int) -> Log:
        """One line for all of it."""
        done = self.state.is_finished()
        return add_checksum(
            {
                "op_code": Op.CREATE_TRIAL,
                "worker_id": "mended",
                "study_id": 0,
                NUMBER: number,
                "datetime_start": self.start or EPOCH,
                **({"datetime_complete": self.end or self.start or EPOCH} if done else {}),
                "state": self.state,
                "value": self.value,
                "values": None,
                "distributions": self.distributions,
                "params": self.params,
                "user_attrs": self.user,
                "system_attrs": self.system,
                "intermediate_values": self.losses,
            }
        )


def _rebuilt(
    logs: Sequence[Log | None],
    study: str,
    distributions: Mapping[str, BaseDistribution],
    known: Mapping[int, Event],
) -> list[Log]:
    """A journal of all that is left: the study, and a line for each trial."""
    records: dict[int, TrialRecord] = {}
    attributes: list[Log] = []
    created: int | None = 0
    """Trials so far, as long as no damaged line may have been one"""
    for log in logs:
        try:
            if log is None:
                created = None
            elif log["op_code"] == Op.CREATE_TRIAL:
                number = log.get(NUMBER, created)
                if number is not None:
                    records.setdefault(number, TrialRecord()).take(log)
                created = None if created is None else created + 1
            elif "trial_id" in log:
                records.setdefault(log["trial_id"], TrialRecord()).take(log)
            elif log["op_code"] in (Op.SET_STUDY_USER_ATTR, Op.SET_STUDY_SYSTEM_ATTR):
                attributes.append(log)
        except (KeyError, TypeError, ValueError, IndexError):
            created = None
    for number in known:
        records.setdefault(number, TrialRecord()).learn(known[number], distributions)
    for number in range(max(records, default=-1) + 1):
        one = records.setdefault(number, TrialRecord())
        if not set(distributions) <= set(one.params):
            one.state, one.value = TrialState.FAIL, None
            one.user = {NOTES: {"stopped": LOST}}
    begin = {
        "op_code": Op.CREATE_STUDY,
        "worker_id": "mended",
        "study_name": study,
        "directions": [StudyDirection.MINIMIZE],
    }
    return [add_checksum(begin), *attributes, *(records[n].to_log(n) for n in sorted(records))]
