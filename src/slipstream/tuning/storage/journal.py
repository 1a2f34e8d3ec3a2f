"""The journal of a study that one process searches: Optuna's format, with a checksum per line.

Optuna ignores the checksums. Before a journal is opened again, `repair` checks it: it drops a
truncated end, and where a line within is damaged it rebuilds the file from the other lines and from
the finished trials in the log of the search.
"""

import json
import os
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
"""One operation of the journal"""
Distributions = Mapping[str, BaseDistribution]
JOURNAL = "study.log"
"""In the folder of a search"""
CHECKSUM, NUMBER = "sum", "number"
"""Our own keys: the checksum of a line, and the number of a trial that is a single line"""
NOTES = "slipstream"
"""The user attribute of a trial with what Slipstream records about it"""
STATE_NAMES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
CUT_OFF = "cut off"
"""The state of a trial that `tune.minutes` ended; Optuna has it as pruned"""
OUT_OF_TIME = "tune.minutes have passed"
STATES = {name: state for state, name in STATE_NAMES.items()} | {CUT_OFF: TrialState.PRUNED}
OP_CODES = frozenset(Op)
FLUSHED = (Op.CREATE_STUDY, Op.SET_TRIAL_STATE_VALUES)
"""Operations that the disk has to store at once"""
LOST = "its settings were lost with a damaged line of study.log"
UNKNOWN_TIME = "1970-01-01T00:00:00+00:00"


def name_state(state: TrialState, notes: Mapping[str, Any]) -> str:
    """Return the name of a trial's state, by what is noted about it."""
    is_cut_off = state == TrialState.PRUNED and OUT_OF_TIME in notes.get("stopped", "")
    return CUT_OFF if is_cut_off else STATE_NAMES.get(state, "under way")


class ChecksummedJournal(JournalFileBackend):
    """Optuna's journal file with a checksum in each line.

    The process holds the lock of the run, so the journal needs none. A kill loses no line. Only a
    power failure can lose lines since the last `flush`, which costs milliseconds: it comes with
    every result and every new trial, not with every value.
    """

    def append_logs(self, logs: list[Log]) -> None:
        with Path(self._file_path).open("ab") as file:
            file.write(self.encode(logs))
        if any(log["op_code"] in FLUSHED for log in logs):
            self.flush()

    def encode(self, logs: list[Log]) -> bytes:
        lines = [json.dumps(add_checksum(log), separators=(",", ":")) + "\n" for log in logs]
        return "".join(lines).encode()

    def flush(self) -> None:
        """Have the disk store all lines."""
        with Path(self._file_path).open("ab") as file:
            os.fsync(file.fileno())


def add_checksum(log: Mapping[str, Any]) -> Log:
    return {**log, CHECKSUM: _compute_checksum(log)}


def _compute_checksum(log: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in log.items() if key != CHECKSUM}
    return _compute_crc(json.dumps(rest, separators=(",", ":")))


def _compute_crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def repair(
    path: Path, study: str, distributions: Distributions, events: Iterable[Event]
) -> list[str]:
    """Make the journal readable for Optuna to its end; return what was wrong, a sentence each.

    The caller holds the lock of the run, so a lock file of Optuna belongs to a dead process.
    """
    Path(f"{path}.lock").unlink(missing_ok=True)
    finished = _find_finished(events)
    content = path.read_bytes() if path.exists() else b""
    logs = _parse_logs(content)
    intact = [log for log in logs if log is not None]
    if None not in logs[:-1] and _is_valid(intact, finished):
        if len(intact) == len(logs) == content.count(b"\n"):
            return []
        _replace(path, content, intact)
        problem = "its end was truncated or damaged, and the last operation is repeated"
        if content.endswith(b"\n") and logs[-1] is not None:
            problem = "a line break was damaged, and nothing is lost"
        return [f"{path}: {problem}; the damaged file is {_backup(path).name}"]
    rebuilt = _rebuild(logs, study, distributions, finished)
    if not _is_valid(rebuilt, {}):
        raise UserError(
            f"{path}: is damaged beyond repair; restore it from a backup, or start a new search "
            f"(the finished trials are in {path.with_name('events.jsonl')})"
        )
    _replace(path, content, rebuilt)
    count = logs.count(None)
    return [
        f"{path}: {count or 'some'} damaged part{'s' if count > 1 else ''}; rebuilt from the other "
        f"lines and events.jsonl, the damaged file is {_backup(path).name}"
    ]


def _backup(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _replace(path: Path, content: bytes, logs: Sequence[Log]) -> None:
    """Write the journal again, and keep the damaged content beside it."""
    if content:
        with runs.replace_atomically(_backup(path)) as temporary:
            temporary.write_bytes(content)
    lines = (json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
    runs.write_text(path, "".join(lines))


def _parse_logs(content: bytes) -> list[Log | None]:
    """Return every operation; None for a damaged part."""
    logs: list[Log | None] = []
    for line in content.split(b"\n"):
        for log in _parse_line(line.decode(errors="replace")) if line else []:
            if log is not None or not logs or logs[-1] is not None:
                logs.append(log)
    return logs


def _parse_line(line: str) -> list[Log | None]:
    """Return the operation of a line; two where the line break between them was damaged."""
    starts = [match.start() for match in re.finditer(r'\{"op_code"', line)]
    if len(starts) < 2:
        return [parse_log(line)]
    ends = [*starts[1:], len(line) + 1]
    return [parse_log(line[a : b - 1]) for a, b in zip(starts, ends, strict=True)]


def parse_log(text: str) -> Log | None:
    """Return the operation of a line; None if it is damaged."""
    try:
        log = json.loads(text)
    except ValueError:
        return None
    if not isinstance(log, dict) or log.get("op_code") not in OP_CODES:
        return None
    checksum = log.get(CHECKSUM)
    end = f',"{CHECKSUM}":"{checksum}"}}'
    if text.endswith(end):  # as we write it: no need to format the rest again
        rest = text[: -len(end)] + "}"
        return log if checksum == _compute_crc(rest) else None
    return log if checksum in (None, _compute_checksum(log)) else None


def _is_valid(logs: Sequence[Log], finished: Mapping[int, Event]) -> bool:
    """Whether Optuna accepts these operations and has every trial that is known to be finished."""
    replayed = JournalStorageReplayResult("")
    try:
        replayed.apply_logs(logs)
        trials = replayed.get_all_trials(0, None) if logs else []
    except Exception:  # of any kind: Optuna does not expect damage
        return False
    return {trial.number for trial in trials if trial.state.is_finished()} >= finished.keys()


def _find_finished(events: Iterable[Event]) -> dict[int, Event]:
    """Return the events of finished trials in the log of the search, by trial number."""
    finished = {}
    for event in events:
        match event:
            case {"event": "trial", "trial": int(number), "params": dict(), "state": str(state)}:
                has_value = isinstance(event.get("value"), float) or state != "finished"
                if number >= 0 and state in STATES and has_value:
                    finished[number] = event
    return finished


@dataclass
class TrialRecord:
    """What the intact lines and the log say about one trial."""

    params: dict[str, float] = field(default_factory=dict)
    """In Optuna's internal representation"""
    distributions: dict[str, str] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    state: TrialState = TrialState.RUNNING
    value: float | None = None
    start: str | None = None
    end: str | None = None

    def apply(self, log: Log) -> None:
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
                self.start, self.end = log["datetime_start"], log.get("datetime_complete")
                self.params |= log.get("params", {})
                self.distributions |= log.get("distributions", {})
                self.losses |= log.get("intermediate_values", {})
                self.user |= log.get("user_attrs", {})
                self.system |= log.get("system_attrs", {})
                self.state = TrialState(log.get("state", self.state))
                self.value = log.get("value")

    def complete(self, event: Event, distributions: Distributions) -> None:
        """Add what is missing from the event of the finished trial."""
        for name, value in event["params"].items():
            if name in distributions and name not in self.params:
                try:
                    self.params[name] = distributions[name].to_internal_repr(value)
                except ValueError:
                    continue
                self.distributions[name] = distribution_to_json(distributions[name])
        if not self.state.is_finished():
            self.state, self.value = STATES[event["state"]], event.get("value")
        other = ("event", "at_s", "trial", "params", "state", "value")
        self.user.setdefault(NOTES, {k: v for k, v in event.items() if k not in other})

    def to_log(self, number: int) -> Log:
        """Return one operation that creates the trial with all its values."""
        end = {"datetime_complete": self.end or self.start or UNKNOWN_TIME}
        return add_checksum(
            {
                "op_code": Op.CREATE_TRIAL,
                "worker_id": "mended",
                "study_id": 0,
                NUMBER: number,
                "datetime_start": self.start or UNKNOWN_TIME,
                **(end if self.state.is_finished() else {}),
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


def _rebuild(
    logs: Sequence[Log | None],
    study: str,
    distributions: Distributions,
    finished: Mapping[int, Event],
) -> list[Log]:
    """Build a journal of what is left: the study, its attributes and one line for each trial."""
    records, attributes = _collect_records(logs)
    for number, event in finished.items():
        records.setdefault(number, TrialRecord()).complete(event, distributions)
    for number in range(max(records, default=-1) + 1):
        record = records.setdefault(number, TrialRecord())
        if not set(distributions) <= set(record.params):
            record.state, record.value = TrialState.FAIL, None
            record.user = {NOTES: {"stopped": LOST}}
    create_study = {
        "op_code": Op.CREATE_STUDY,
        "worker_id": "mended",
        "study_name": study,
        "directions": [StudyDirection.MINIMIZE],
    }
    trials = (records[number].to_log(number) for number in sorted(records))
    return [add_checksum(create_study), *attributes, *trials]


def _collect_records(logs: Sequence[Log | None]) -> tuple[dict[int, TrialRecord], list[Log]]:
    """Return what the intact lines say: the trials by number, and the attributes of the study."""
    records: dict[int, TrialRecord] = {}
    attributes: list[Log] = []
    num_created: int | None = 0
    """None after a damaged line, which may have created a trial"""
    for log in logs:
        try:
            if log is None:
                num_created = None
            elif log["op_code"] == Op.CREATE_TRIAL:
                if (number := log.get(NUMBER, num_created)) is not None:
                    records.setdefault(number, TrialRecord()).apply(log)
                num_created = None if num_created is None else num_created + 1
            elif "trial_id" in log:
                records.setdefault(log["trial_id"], TrialRecord()).apply(log)
            elif log["op_code"] in (Op.SET_STUDY_USER_ATTR, Op.SET_STUDY_SYSTEM_ATTR):
                attributes.append(log)
        except (KeyError, TypeError, ValueError, IndexError):
            num_created = None
    return records, attributes
