"""Write docs/api.md from the docstrings of the public names, so that the two cannot differ.

python dev/api.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import slipstream

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
INTRO = """# Python API

`import slipstream` provides these names and loads torch on first use. `help(slipstream.train)`
shows the same text. Everything else in the package is private and may change. `make docs` builds
this page from the docstrings.
"""
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
LISTS = ("Args", "Attributes", "Raises")
ORDER = (
    *(
        "inspect",
        "prepare",
        "train",
        "evaluate",
        "export",
        "predict",
        "load",
        "report",
        "follow",
        "ensemble",
        "tune",
        "auto",
        "pretrain",
        "probe",
        "train_share",
    ),
    *("list_runs", "show_run", "compare_runs", "best_run", "copy_run", "remove_runs", "prune_runs"),
    *(
        "Forecaster",
        "Stream",
        "StreamPrediction",
        "TrainedModel",
        "Inspection",
        "Result",
        "Study",
        "Probe",
        "Evaluation",
        "StreamEvaluation",
        "RunRow",
        "Comparison",
    ),
    *("events", "event_schema", "Config", "UserError", "Interrupted"),
)


def format_signature(name: str, value: Any) -> str:
    """Format the signature of a function, one parameter per line where it is long."""
    signature = inspect.signature(value)
    parameters = list(signature.parameters.values())
    parts = [format_parameter(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    head, tail = f"slipstream.{name}(", f") -> {signature.return_annotation}"
    short = head + ", ".join(parts) + tail
    return short if len(short) <= 90 else "\n".join([head, *(f"    {p}," for p in parts), tail])


def format_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    value = parameter.default
    if value is parameter.empty:
        default = ""
    elif inspect.isroutine(value):  # its repr may have an address
        default = f" = {value.__module__.removeprefix('_')}.{value.__name__}"
    else:
        default = f" = {value!r}"
    return f"{stars}{parameter.name}: {parameter.annotation}{default}"


def split_sections(text: str) -> Iterator[tuple[str, str]]:
    """Split a docstring into its description, named "", and its sections."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    yield "", parts[0].strip()
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield title, textwrap.dedent(body).strip()


def format_section(title: str, body: str) -> str:
    if title == "Example":
        return f"```python\n{body}\n```"
    if title not in LISTS:
        return f"{title}: {' '.join(body.split())}" if title else body
    items = re.split(r"\n(?=\S)", body)
    rows = []
    for item in items:
        name, _, description = item.partition(":")
        assert name.isidentifier(), f"an entry of {title} begins with {name!r}, not with a name"
        rows.append(f"- `{name}`: {' '.join(description.split())}")
    return f"{title}:\n\n" + "\n".join(rows)


def format_heading(name: str) -> str:
    value = getattr(slipstream, name)
    if inspect.ismodule(value):
        return f"module {name}"
    return f"class {name}" if inspect.isclass(value) else f"{name}()"


def list_events() -> str:
    """The fields of every event, as a table."""
    rows = ["| event | when | fields |", "|---|---|---|"]
    for name in slipstream.events.__all__:
        kind = getattr(slipstream.events, name)
        if not inspect.isclass(kind):
            continue
        fields = (field.name for field in dataclasses.fields(kind) if field.name != "at_s")
        when = " ".join(kind.__doc__.partition("\n\n")[0].split())
        rows.append(f"| `{name}` | {when} | {', '.join(f'`{field}`' for field in fields)} |")
    return "\n".join(rows)


def describe(name: str) -> str:
    """The entry of one public name."""
    value = getattr(slipstream, name)
    parts = [f"## {format_heading(name)}"]
    if inspect.isfunction(value):
        parts.append(f"```python\n{format_signature(name, value)}\n```")
    text = inspect.cleandoc(value.__doc__)
    parts += [format_section(title, body) for title, body in split_sections(text)]
    if inspect.ismodule(value):
        parts.append(list_events())
    return "\n\n".join(parts)


def page() -> str:
    missing = set(slipstream.__all__) ^ set(ORDER)
    assert not missing, f"ORDER in dev/api.py and slipstream.__all__ differ: {missing}"
    rows = ["| name | what it does |", "|---|---|"]
    for name in ORDER:
        first = inspect.cleandoc(getattr(slipstream, name).__doc__).partition("\n\n")[0]
        anchor = re.sub("[^a-z_ ]", "", format_heading(name).lower()).replace(" ", "-")
        rows.append(f"| [`{name}`](#{anchor}) | {' '.join(first.split())} |")
    return "\n\n".join([INTRO.strip(), "\n".join(rows), *map(describe, ORDER)]) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else "run `make docs`")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
