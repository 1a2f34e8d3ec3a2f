"""Messages about wrong configs: which setting, its value, the values that it takes, and where it
was set.

Pydantic reports types; a user wrote TOML. So a tuple is a list here, True is true, and a setting is
named with the file and line, or the option, that it comes from.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_origin

from pydantic import ValidationError

from slipstream.base.errors import Message, Text, UserError, join_messages
from slipstream.base.text import find_nearest
from slipstream.config.base import AUTO, PATTERN_WORDS, Section, list_from_data

MAX_CHARACTERS = 200
"""The number of a value's characters that a message shows"""
TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table, as in { key = value }",
    "model": "a section of settings, as in [section] or { key = value }",
    "finite_number": "a finite number",
}
"""The words for the types of pydantic's errors such as `int_type` and `int_parsing`"""
BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
SYNONYMS = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "early_stopping": "patience",
    "gradient_clip": "clip",
    "grad_clip": "clip",
    "hidden_size": "hidden",
    "hidden_dim": "hidden",
    "units": "hidden",
    "d_model": "hidden",
    "num_layers": "layers",
    "n_layers": "layers",
    "num_heads": "heads",
    "n_heads": "heads",
    "type": "kind",
    "lookback": "context",
    "seq_len": "context",
    "input_window": "context",
    "pred_len": "horizon",
    "forecast_horizon": "horizon",
    "features": "inputs",
    "columns": "inputs",
    "labels_column": "targets",
    "file": "path",
    "files": "path",
    "folder": "path",
    "timestamp": "time",
    "date": "time",
    "n_trials": "trials",
    "max_trials": "trials",
    "timeout": "minutes",
    "num_workers": "workers",
    "min": "low",
    "max": "high",
}
"""Names that other tools give to settings"""
VALUE_SYNONYMS = {
    "gpu": "cuda",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "ffill": "forward",
    "l1": "mae",
    "l2": "mse",
    "none": "off",
    "fnn": "mlp",
}
"""Names that other tools give to values"""
KEY = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
TABLE_LINE = re.compile(rf"\s*\[\[?\s*({KEY}(?:\s*\.\s*{KEY})*)\s*\]")
KEY_LINE = re.compile(rf"\s*({KEY}(?:\s*\.\s*{KEY})*)\s*=")
DOTTED = re.compile(r"\b[a-z]+(?:\.[a-z_]+)+\b")
STEP = re.compile(r"\bdata\.prepare, step (\d+)")
STEP_HEADING = r"^[ \t]*\[\[\s*data\s*\.\s*prepare\s*\]\]"
TOML_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class SettingProblem(NamedTuple):
    """A wrong setting."""

    path: tuple[str, ...]
    """The setting, or the section whose settings do not fit each other"""
    message: Text


class ConfigError(UserError):
    """Settings that are wrong, one by one."""

    def __init__(self, message: Text, problems: Sequence[SettingProblem]) -> None:
        super().__init__(message)
        self.problems = problems


@dataclass(frozen=True)
class Origin:
    """Where settings come from."""

    name: str
    """The config file, or "config" """
    text: str = ""
    """The file's TOML"""
    overrides: Mapping[tuple[str, ...], Text] = field(default_factory=dict)
    """The option or argument of each override, by its setting"""

    def format_problems(self, problems: Sequence[SettingProblem]) -> Message:
        """Return one line per problem, each with the file and line, or the option, to correct."""
        lines = (Message(self._locate(problem), ": ", problem.message) for problem in problems)
        return join_messages(lines, "\n  ")

    def _locate(self, problem: SettingProblem) -> Text:
        """Return the override, or the file and line, that sets the wrong setting."""
        text = str(problem.message)
        named = [tuple(name.split(".")) for name in DOTTED.findall(text)]
        for path in (problem.path, *named):
            for key, option in self.overrides.items():
                if key == path or (len(path) > 1 and key[: len(path)] == path[: len(key)]):
                    return option
        if step := find_step(text):
            headings = re.finditer(STEP_HEADING, self.text, re.MULTILINE)
            match = next(itertools.islice(headings, step - 1, None), None)
            if match:
                return f"{self.name}, line {self.text.count(chr(10), 0, match.start()) + 1}"
        lines = (find_line(self.text, path) for path in (*named, problem.path))
        line = next((line for line in lines if line), None)
        return f"{self.name}, line {line}" if line else self.name


def find_step(message: str) -> int | None:
    """Return the number of the step of `data.prepare` that a message names, as `name_step` does."""
    match = STEP.search(message)
    return int(match[1]) if match else None


def find_line(text: str, path: Sequence[str]) -> int | None:
    """Return the line of a TOML text that sets a setting, or the heading of a section."""
    table: list[str] = []
    heading = None
    for number, line in enumerate(text.splitlines(), start=1):
        if match := TABLE_LINE.match(line):
            table = _split_key(match[1])
            if path and table == list(path):
                heading = number
        elif match := KEY_LINE.match(line):
            key = [*table, *_split_key(match[1])]
            if key == list(path[: len(key)]):  # or an inline table around it
                return number
    return heading


def _split_key(text: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(KEY, text)]


def explain(error: ValidationError, root: type[Section]) -> list[SettingProblem]:
    """Return the problems of a validation error; alternatives of one setting are joined into one
    problem."""
    grouped: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for item in error.errors():
        path, _ = _locate(item["loc"], root)
        grouped.setdefault(path, []).append(item)
    return [
        SettingProblem(path, _explain_setting(path, items, root)) for path, items in grouped.items()
    ]


def _explain_setting(
    path: tuple[str, ...], items: Sequence[Mapping[str, Any]], root: type[Section]
) -> Text:
    setting = ".".join(path)
    for item in items:
        if item["type"] == "extra_forbidden":
            section = _locate(item["loc"], root)[1]
            return f"{setting} is not a setting{_suggest_setting(path[-1], section, root)}"
        if item["type"] == "value_error":
            errors = (problem["ctx"].get("error") for problem in items)
            return join_messages(_get_message(error) for error in errors if error is not None)
    entries = [(_find_index(item["loc"][len(path) :]), item) for item in items]
    if any(index is not None for index, _ in entries):  # it is a list, and an entry is wrong
        index = max(index for index, _ in entries if index is not None)
        items = [item for number, item in entries if number == index]
        setting = f"{setting}: entry {index + 1}"
    section = _locate(path, root)[1]
    accepts_auto = setting == ".".join(path) and path[-1] in list_from_data(section)
    return f"{setting} is {describe_mismatch(items, (AUTO,) if accepts_auto else ())}"


def _get_message(error: ValueError) -> Text:
    """Return the message of a validator's exception, with its parts."""
    return error.args[0] if isinstance(error.args[0], Message) else str(error)


def _find_index(loc: Sequence[int | str]) -> int | None:
    return next((part for part in loc if isinstance(part, int)), None)


def describe_mismatch(items: Sequence[Mapping[str, Any]], words: Sequence[str] = ()) -> str:
    """Return a description of a value and of the accepted values, from all errors about it; `words`
    are accepted as well."""
    value = items[0]["input"]
    if items[0]["type"] == "missing":
        return "missing"
    expected = list(dict.fromkeys(text for item in items for text in _list_expected(item)))
    expected += [f'"{word}"' for word in words]
    choices = [text.strip('"') for text in expected if text.startswith('"')]
    if choices and "text" in expected:  # the choices say more
        expected.remove("text")
    *first_types, last = expected
    should = f"{', '.join(first_types)} or {last}" if first_types else last
    nearest = _find_choice(value, choices) if isinstance(value, str) else None
    hint = f' did you mean "{nearest}"? It' if nearest else " it"
    text = f"{format_value(value)};{hint} should be {should}"
    return text + (_suggest_form(value, expected) if isinstance(value, str) else "")


def _find_choice(value: str, choices: Sequence[str]) -> str | None:
    synonym = VALUE_SYNONYMS.get(value.casefold())
    return synonym if synonym in choices else find_nearest(value, choices)


def _suggest_form(text: str, expected: Sequence[str]) -> str:
    """Return the spelling of a text as the number or the list that it should be."""
    if re.fullmatch(r"[+-]?[\d.]+", text) and {"an integer", "a number"} & set(expected):
        return f"; write {text} without quotes"
    if expected == ["a list"]:
        fix = f"[{format_value(text)}]"
        return '; quote its entries: ["a", "b"]' if text.startswith("[") else f", as in {fix}"
    return ""


def _list_expected(item: Mapping[str, Any]) -> list[str]:
    """Return the values that one alternative of a setting takes, in words."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "literal_error":
        return [f'"{choice}"' for choice in re.findall(r"'([^']*)'", context["expected"])]
    if kind == "string_pattern_mismatch":
        words = PATTERN_WORDS[context["pattern"]]
        if not words:  # not for users to write
            return []
        return words.split(", ") if words.startswith('"') else [words]
    if kind == "too_short":
        return [f"a list of at least {context['min_length']}"]
    if kind.startswith(("greater_than", "less_than")):
        key = next(key for key in BOUNDS if key in context)
        bound = context[key]
        return [f"{BOUNDS[key]} {f'{bound:,}' if isinstance(bound, int) else f'{bound:g}'}"]
    name = re.sub("_(type|parsing|from_float)$", "", kind)
    return [TYPES.get(name) or str(item["msg"]).replace("Input should be ", "")]


def format_value(value: Any) -> str:
    """Format a value as TOML does, shortened to fit into a message."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return shorten(text)


def shorten(text: str) -> str:
    """Shorten a value to fit into a message."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters)"


def _locate(loc: Sequence[int | str], root: type[Section]) -> tuple[tuple[str, ...], type[Section]]:
    """Return the setting's path, without the branches of unions, and its section."""
    section, path, in_dict = root, [], False
    for part in map(str, loc):
        path.append(part)
        if in_dict:
            break
        known = section.model_fields.get(part)
        inner = known.annotation if known else None
        if in_dict := get_origin(inner) is dict:
            continue  # the entry's own name follows
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            break
        section = inner
    return tuple(path), section


def _suggest_setting(key: str, section: type[Section], root: type[Section]) -> str:
    synonym = SYNONYMS.get(key.casefold())
    if synonym in section.model_fields:
        return f'; did you mean "{synonym}"?'
    if nearest := find_nearest(key, section.model_fields):
        return f'; did you mean "{nearest}"?'
    sections = dict(_iter_sections(root))
    if key in sections:
        return f'; did you mean the section "[{key}]"?'
    for name, inner in sections.items():
        if key in inner.model_fields or synonym in inner.model_fields:
            return f'; did you mean "{name}.{key if key in inner.model_fields else synonym}"?'
    return f"; known here: {', '.join(section.model_fields)}"


def _iter_sections(root: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, known in root.model_fields.items():
        inner = known.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield name, inner


def explain_toml(path: str, text: str, message: str) -> str:
    """Return a message about a text that is not TOML: the file, the line, the problem and a fix."""
    match = TOML_POSITION.search(message)
    problem = message[: match.start()] if match else message
    problem = problem[:1].lower() + problem[1:]
    lines = text.splitlines() or [""]
    number = int(match[1]) if match and match[1] else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    return f'{path}, line {number}: is not valid TOML: {problem}; it reads "{shorten(line)}"' + (
        _suggest_toml(line, problem)
    )


def _suggest_toml(line: str, problem: str) -> str:
    """Return the fix of the usual mistakes; empty for others."""
    key, equals, value = (part.strip() for part in line.partition("="))
    if "\\" in value:
        return "; in paths write / for \\, or put them in single quotes"
    if equals and re.match(r"[A-Za-z]", value) and "value" in problem:
        word = value.split("#")[0].strip()
        if word.lower() in ("true", "false"):
            return f"; write {key} = {word.lower()}"
        return f'; text needs quotes: {key} = "{word}"'
    if not equals and ":" in line:
        return "; write key = value"
    if "overwrite" in problem or "declare" in problem:
        return "; it is set twice: keep one"
    if line.count('"') % 2 or "illegal character '\\n'" in problem:
        return "; close the quote"
    if "unclosed array" in problem:
        return "; close the list with ]"
    return ""
