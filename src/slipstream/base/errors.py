"""The exceptions that leave Slipstream, and the messages that they carry.

Exception
└── ExplainedError         has a message for a person; never raised itself
    ├── UserError          a mistake in the config, the data or the call; exit code 2
    │   ├── DivergedError  no model reached a finite loss with these settings
    │   └── StorageError   object storage cannot be reached; a run that trains then can be resumed
    ├── ResumableError     the run ended early, but can be resumed from there; exit code 75
    └── Interrupted        Ctrl-C, SIGTERM or SIGUSR1, after the run was saved; exit code 130, 143
                           or 75

Any other exception is a bug and exits with 1.

A message is worded once. What depends on the reader is a part of it: an `Option` is `--force` in
the terminal and `force=True` in Python, a `Command` is `slipstream train --resume X` and
`slipstream.train(resume="X")`. What a button of the app can carry out is a part as well: a
`Setting` to set, a column to leave out. Parts and texts are joined with `+`:

    raise UserError(f"{folder}: holds an export; pass " + Option("force", True) + " to replace it")

An f-string would keep the terminal's wording alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypeVar

from slipstream.base.text import escape_controls

EXIT_RESUMABLE = 75
"""The exit code of a run that stopped early and can be resumed"""
WARNING: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""The signal with which batch systems warn of a time limit; None on Windows, which does not have
it"""
Reader = Literal["terminal", "python"]
"""Who reads a message: the app shows the terminal's wording"""
E = TypeVar("E", bound="ExplainedError")
PLACEHOLDER = re.compile(r"[A-Z]+|\d+")
"""A value that Python code shows without quotes: a number, or a word for the user to replace"""


class Message:
    """A text for people with parts that depend on the reader; `str` gives the terminal's words."""

    def __init__(self, *parts: str | Message) -> None:
        self._parts = parts

    @property
    def parts(self) -> tuple[str | Message, ...]:
        """The texts and the parts with a class of their own, in order."""
        inner = ((part,) if isinstance(part, str) else part.parts for part in self._parts)
        return tuple(part for parts in inner for part in parts)

    def render(self, reader: Reader) -> str:
        """Return the message in the words of this reader."""
        return "".join(
            part if isinstance(part, str) else part.render(reader) for part in self._parts
        )

    def map_texts(self, change: Callable[[str], str]) -> Message:
        """Return the message with its texts changed, and its other parts as they are."""
        return Message(*(change(part) if isinstance(part, str) else part for part in self.parts))

    def __str__(self) -> str:
        return self.render("terminal")

    def __repr__(self) -> str:
        return repr(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(str(self))

    def __add__(self, other: str | Message) -> Message:
        return Message(self, other)

    def __radd__(self, other: str) -> Message:
        return Message(other, self)


Text = str | Message
"""A message, or plain text, for functions that show one"""


class _Part(Message):
    """A part of a message with data of its own; a frozen dataclass."""

    @property
    def parts(self) -> tuple[str | Message, ...]:
        return (self,)


@dataclass(frozen=True, repr=False)
class Wording(_Part):
    """Words for the terminal and other words for Python."""

    terminal: str
    python: str

    def render(self, reader: Reader) -> str:
        return self.python if reader == "python" else self.terminal


SAME_COMMAND = Wording("the same command", "the same call")
_ARGUMENTS = {"set": "overrides", "encoder": "run"}
"""The arguments of Python whose options have another name"""


@dataclass(frozen=True, repr=False)
class Option(_Part):
    """An option of the command line, or an argument of a function: with its value, or its name
    alone where that is None. `True` is the value of a flag."""

    name: str
    value: object = None

    def render(self, reader: Reader) -> str:
        if reader == "terminal":
            has_value = self.value is not None and self.value is not True
            value = str(self.value)
            is_bare = len(value.split()) > 1 and not {"'", '"'} & set(value)
            value = shlex.quote(value) if is_bare else value
            return f"--{self.name} {value}" if has_value else f"--{self.name}"
        name = _ARGUMENTS.get(self.name, self.name).replace("-", "_")
        return name if self.value is None else f"{name}={format_argument(self.value)}"


DATA_FILE = Wording("--data FILE", "data=TABLE")
DATA_PATH = Wording("--set data.path=FILE (in Python data=TABLE)", "data=TABLE")
"""How rows are passed to a command that reads a config, and to its function"""
_FUNCTIONS = {"copy": "copy_run", "runs": "list_runs"}
"""The functions of Python whose commands have another name"""


@dataclass(frozen=True, repr=False, init=False)
class Command(_Part):
    """A command, or the call of the function that does the same: its arguments, then its options.

    `Command("train", resume=folder)` is `slipstream train --resume FOLDER` in the terminal and
    `slipstream.train(resume="FOLDER")` in Python; without arguments it is `slipstream train` and
    `slipstream.train`."""

    name: str
    arguments: tuple[str, ...]
    options: tuple[Option, ...]

    def __init__(self, name: str, *arguments: object, **options: object) -> None:
        made = (Option(key.replace("_", "-"), _simplify(value)) for key, value in options.items())
        vars(self).update(name=name, arguments=tuple(map(str, arguments)), options=tuple(made))

    def add(self, **options: object) -> Command:
        """Return the command with further options."""
        known = {option.name.replace("-", "_"): option.value for option in self.options}
        return Command(self.name, *self.arguments, **(known | options))

    def take(self, *arguments: object) -> Command:
        """Return the command with further arguments."""
        known = {option.name.replace("-", "_"): option.value for option in self.options}
        return Command(self.name, *self.arguments, *arguments, **known)

    def render(self, reader: Reader) -> str:
        options = [option.render(reader) for option in self.options]
        if reader == "terminal":
            return " ".join(["slipstream", self.name, *self.arguments, *options])
        name = f"slipstream.{_FUNCTIONS.get(self.name, self.name)}"
        arguments = [*map(format_argument, self.arguments), *options]
        return f"{name}({', '.join(arguments)})" if arguments else name


@dataclass(frozen=True, repr=False)
class Setting(_Part):
    """Settings to set, with their values, as the config has them: `data.short = "drop"`. The app
    makes one button of them."""

    values: Mapping[str, Any]

    def render(self, reader: Reader) -> str:
        pairs = (
            f"{name} = {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.values.items()
        )
        return " and ".join(pairs)

    def __hash__(self) -> int:
        return hash(tuple(self.values))


@dataclass(frozen=True, repr=False)
class LeaveOut(_Part):
    """Words on a column to leave out of a setting that lists columns, or to add to `data.ignore`;
    the app makes a button of them."""

    words: str
    column: str
    setting: str

    def render(self, reader: Reader) -> str:
        return self.words


def _simplify(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def format_argument(value: object) -> str:
    """Return a value as Python code: in quotes, unless it is a number or a word to replace."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    text = str(value)
    return text if PLACEHOLDER.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def join_messages(messages: Iterable[Text], separator: str = "; ") -> Message:
    """Return several messages as one, one after the other."""
    joined = Message()
    for number, message in enumerate(messages):
        joined = joined + (separator if number else "") + message
    return joined


_PARTS: dict[str, type[Message]] = {
    "wording": Wording,
    "option": Option,
    "setting": Setting,
    "leave_out": LeaveOut,
}


def to_json_message(message: Text) -> list[str | dict[str, Any]]:
    """Return a message as values of JSON, for another process."""
    parts = (message,) if isinstance(message, str) else message.parts
    return [part if isinstance(part, str) else _describe_part(part) for part in parts]


def _describe_part(part: Message) -> dict[str, Any]:
    if isinstance(part, Command):
        options = {option.name.replace("-", "_"): option.value for option in part.options}
        return {"part": "command", "name": part.name, "arguments": part.arguments} | (
            {"options": options}
        )
    (name,) = (name for name, kind in _PARTS.items() if isinstance(part, kind))
    return {"part": name, **vars(part)}


def parse_json_message(values: Any) -> Message:
    """Return the message that another process sent, as `to_json_message` wrote it."""
    parts: list[str | Message] = []
    for value in [values] if isinstance(values, str) else values:
        if isinstance(value, str):
            parts.append(value)
        elif value["part"] == "command":
            parts.append(Command(value["name"], *value["arguments"], **value["options"]))
        else:
            fields = {key: entry for key, entry in value.items() if key != "part"}
            parts.append(_PARTS[value["part"]](**fields))
    return Message(*parts)


class ExplainedError(Exception):
    """An error with a message for people, and where it is known, with the way out of it.

    Attributes:
        fix: What to do about it; the message ends with it.
        reader: In whose words `str` gives the message.
    """

    reader: Reader = "terminal"

    def __init__(self, message: Text, *, fix: Text | None = None) -> None:
        super().__init__(message)
        self.fix = fix

    @property
    def reason(self) -> Message:
        """The message without the fix."""
        return Message(self.args[0] if isinstance(self.args[0], Text) else str(self.args[0]))

    @property
    def message(self) -> Message:
        """The whole message: the reason and the fix."""
        return self.reason if self.fix is None else self.reason + "; " + self.fix

    def to_json(self) -> dict[str, Any]:
        """Return the error as values of JSON, for another process; `parse_json_error` reads it."""
        fix = None if self.fix is None else to_json_message(self.fix)
        return {"what": to_json_message(self.reason), "fix": fix}

    def __str__(self) -> str:
        """Return the message; a terminal must not act on what it quotes from files."""
        return escape_controls(self.message.render(self.reader))


class UserError(ExplainedError):
    """A mistake in the config, the data or a call.

    The message says which setting, file or line is wrong, its value, what is accepted and the fix.

    Attributes:
        setting: The setting that is wrong, such as "data.context", or None.
        file: The file that is wrong, or None.
        line: The line of the file, or None.

    Example:
        try:
            slipstream.train("job.toml")
        except slipstream.UserError as error:
            print(error)
    """

    def __init__(
        self,
        message: Text | None = None,
        *,
        setting: str | None = None,
        file: str | PathLike[str] | None = None,
        line: int | None = None,
        found: Text | None = None,
        accepted: Text | None = None,
        fix: Text | None = None,
    ) -> None:
        """Word an error from what is known; a `message` takes the place of the words on the
        setting, its value and what is accepted."""
        if message is None:
            message = join_messages(_describe_value(setting, found, accepted))
        if file is not None:
            where = f"{os.fspath(file)}, line {line}" if line is not None else os.fspath(file)
            message = (
                f"{where}: " + message if isinstance(message, Message) else f"{where}: {message}"
            )
        super().__init__(message, fix=fix)
        self.setting, self.file, self.line = setting, file, line


def parse_json_error(kind: type[E], values: Mapping[str, Any]) -> E:
    """Return the error that another process sent, as `ExplainedError.to_json` wrote it."""
    fix = None if values["fix"] is None else parse_json_message(values["fix"])
    return kind(parse_json_message(values["what"]), fix=fix)


def _describe_value(
    setting: str | None, found: Text | None, accepted: Text | None
) -> Iterator[Text]:
    """Yield that a setting, or what the file before it holds, has a value that is not accepted."""
    if found is not None:
        yield Message(f"{setting} is " if setting else "is ", found)
    elif setting is not None:
        yield f"{setting} is missing"
    if accepted is not None:
        yield Message("it should be ", accepted)


class DivergedError(UserError):
    """Training ended without a finite validation loss; a search records it as a failed trial."""


class EmptyFileError(UserError):
    """A file has no rows; among others it is left out."""


class EncodingError(UserError):
    """A text file is not UTF-8.

    Attributes:
        encoding: The encoding that it may have, as `data.encoding` names it.
    """

    def __init__(self, message: Text, encoding: str = "cp1252") -> None:
        super().__init__(message, setting="data.encoding")
        self.encoding = encoding


class NoNamesError(UserError):
    """The first line of a text file has values where the names of the columns should be."""


class StorageError(UserError):
    """Object storage cannot be reached, or denies access."""


class ResumableError(ExplainedError):
    """Something outside ended the run, such as a full disk or a read-only folder; it can resume."""


class Interrupted(ExplainedError):
    """Ctrl-C, SIGTERM or SIGUSR1 stopped a run, after it saved a checkpoint.

    Attributes:
        signal_number: The signal.
        exit_code: The exit code of the command: 130, 143, or 75 for SIGUSR1, with which batch
            systems warn of a time limit.

    Example:
        try:
            slipstream.train("job.toml", on_event=show)
        except slipstream.Interrupted as stop:
            sys.exit(stop.exit_code)
    """

    def __init__(self, message: Text, *, signal_number: int, fix: Text | None = None) -> None:
        super().__init__(message, fix=fix)
        self.signal_number = signal_number
        is_warning = signal_number == WARNING
        self.exit_code = EXIT_RESUMABLE if is_warning else 128 + signal_number
