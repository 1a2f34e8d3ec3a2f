"""Write docs/settings.md from the fields of the config, so that the two cannot differ.

python dev/settings.py [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.config import Config
from slipstream.config.base import AUTO, FromData, read_descriptions

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
INTRO = """# Settings

A config is a TOML file. `--set section.key=value` overrides a setting of the file. Unknown keys are
refused with the nearest known one. `make docs` builds this page from the code.
"""
TYPE_NAMES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}


def name_type(annotation: Any) -> str:
    """Name a type in plain words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return name_type(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in get_args(annotation))
    if origin is types.UnionType or str(origin) == "typing.Union":
        parts = [part for part in get_args(annotation) if part is not type(None)]
        if {str, int, float, bool} <= set(parts):
            return " or ".join(["value", *(name_type(p) for p in parts if get_origin(p))])
        if all(hasattr(part, "model_fields") for part in parts):
            return "table"
        named = [name_type(part) for part in parts]
        return " or ".join(dict.fromkeys(named))
    if origin is tuple:
        inner = name_type(get_args(annotation)[0])
        return f"list of {inner}" if inner == "text" else f"list of {inner}s"
    if origin is dict:
        return "table"
    return TYPE_NAMES.get(annotation.__name__, annotation.__name__.lower())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{}"
    if hasattr(value, "model_dump"):
        inner = value.model_dump(exclude_defaults=True)
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in inner.items()) + " }"
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_default(field: FieldInfo) -> str:
    if any(isinstance(mark, FromData) for mark in field.metadata):
        return f"`{_toml(AUTO)}`"
    if field.default is None or field.default is PydanticUndefined:
        return ""
    return f"`{_toml(field.default)}`"


def build_rows(section: Any, prefix: str) -> Iterator[str]:
    yield "| setting | default | type | description |"
    yield "|---|---|---|---|"
    texts = read_descriptions(section)
    for name, field in section.model_fields.items():
        if prefix == "" and hasattr(field.annotation, "model_fields"):
            continue
        text = re.sub(r"\s+", " ", texts.get(name, "")).replace("|", "\\|")
        kind = name_type(field.annotation)
        if any(isinstance(mark, FromData) for mark in field.metadata):
            kind = f'`"{AUTO}"`' + (", " if kind.startswith("`") else " or ") + kind
        cells = (f"`{prefix}{name}`", format_default(field), kind, text)
        yield f"| {' | '.join(cells)} |"


def find_section(annotation: Any) -> Any:
    """Return the section that a setting, or an entry of a table, holds; None if neither does."""
    parts = get_args(get_args(annotation)[1]) if get_origin(annotation) is dict else (annotation,)
    return next((part for part in parts if hasattr(part, "model_fields")), None)


def list_steps(annotation: Any) -> Iterator[Any]:
    """Yield the sections that an entry of a list may be: the steps of `data.prepare`."""
    while get_origin(annotation) in (Annotated, tuple):
        annotation = get_args(annotation)[0]
    for part in get_args(annotation):
        if hasattr(part, "model_fields") and "step" in part.model_fields:
            yield part


def page() -> str:
    parts = [INTRO, *build_rows(Config, "")]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if not hasattr(section, "model_fields"):
            continue
        parts += [
            "",
            f"## [{name}]",
            "",
            inspect.getdoc(section),
            "",
            *build_rows(section, f"{name}."),
        ]
        for inner, deeper in section.model_fields.items():
            found = find_section(deeper.annotation)
            if found is not None:
                whose = "" if found is deeper.annotation else "An entry of "
                parts += ["", f"### {whose}{name}.{inner}", "", inspect.getdoc(found), ""]
                parts += build_rows(found, "" if whose else f"{name}.{inner}.")
            for step in list_steps(deeper.annotation):
                kind = step.model_fields["step"].default
                parts += ["", f'### {name}.{inner}: step = "{kind}"', "", inspect.getdoc(step), ""]
                parts += build_rows(step, "")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else "run `make docs`")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
