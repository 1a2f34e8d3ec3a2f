"""Messages written for the command line, in the words of a caller from Python."""

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slipstream.errors import Interrupted, ResumableError, UserError

P = ParamSpec("P")
T = TypeVar("T")
PLACE = r"(?P<place>[^\s;,]+)"
RESUME = re.compile(
    rf"slipstream (?P<verb>train|tune|pretrain) --resume {PLACE}"
    r"(?P<options>(?: --(?:storage|workers|set) [^\s;,]+)*)"
)
RULES: tuple[tuple[str, str], ...] = (
    (rf"the same command and --resume {PLACE}", r'the same call and folder="\g<place>"'),
    (r"`slipstream runs (?P<out>[^\s`]+)`", r'slipstream.list_runs("\g<out>")'),
    (
        rf"slipstream copy {PLACE} (?P<to>\w+://[^\s;,]*)",
        r'slipstream.copy_run("\g<place>", "\g<to>")',
    ),
    (rf"slipstream copy {PLACE}", r'slipstream.copy_run("\g<place>")'),
    (rf"slipstream report {PLACE} --out FOLDER", r'slipstream.report("\g<place>", out=FOLDER)'),
    (rf"slipstream (?P<verb>train|report) {PLACE}", r'slipstream.\g<verb>("\g<place>")'),
    (r"slipstream (train|tune|pretrain|evaluate|predict|export|report)\b(?! -)", r"slipstream.\1"),
    (r"--allow-code \(in Python allow_code=True\)", "allow_code=True"),
    (r"the same command\b", "the same call"),
    (
        r"pass (?:the same rows again: )?--set data\.path=FILE \(in Python data=TABLE\)",
        "pass data=TABLE",
    ),
    (r"--data FILE\b", "data=TABLE"),
    (r"--set takes", "overrides takes"),
    (r"--set (?P<what>[\w.]+=[^\s;,]+)", r'overrides="\g<what>"'),
    (r"--(?P<name>force|resample|every|allow-code|ensemble|int8)\b", r"\g<name>=True"),
    (r"--after-prepare\b", "after_prepare=True"),
    (r"--(?P<name>name|state) (?P<what>windows|is)\b", r"\g<name> \g<what>"),
    (r"--on ray", 'on="ray"'),
    (r"--encoder RUN", "run=RUN"),
    (r"--to (?P<what>\w+)", r'to="\g<what>"'),
    (r"--(?P<name>[\w-]+) is for", r"\g<name> is for"),
    (r"--(?P<name>storage|workers|out) (?P<what>[A-Z]\w*|\d+|\w+://)", r"\g<name>=\g<what>"),
    (r"--set\b", "overrides"),
    (r"--(?P<name>data|seeds|storage|workers|on|out|resume|share|to)\b", r"\g<name>"),
)
"""Patterns of the command line's words, the most specific first, and what replaces them"""


def translate(message: str) -> str:
    """Return a message with arguments of functions in the place of command-line options."""
    message = RESUME.sub(_format_resume, message)
    for pattern, replacement in RULES:
        message = re.sub(pattern, replacement, message)
    return message.replace("allow-code=True", "allow_code=True")


def _format_resume(command: re.Match[str]) -> str:
    """Return the call that resumes as the command would."""
    arguments = [f'resume="{command["place"]}"']
    for name, value in re.findall(r"--(\w+) (\S+)", command["options"]):
        arguments.append(f'overrides="{value}"' if name == "set" else f"{name}={value}")
    return f"slipstream.{command['verb']}({', '.join(arguments)})"


def speak_python(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function's errors name arguments where the command line would name options."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (UserError, ResumableError, Interrupted) as error:
            error.args = (translate(str(error)), *error.args[1:])
            raise

    return call
