"""When and by which command a result was made."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from slipstream.text.passwords import mask_argument


def describe_origin() -> dict[str, str | None]:
    """Return the entries of a summary on its own origin."""
    return {
        # tells a run from the same one trained longer, which may end within the same second
        "finished_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": find_command(sys.argv),
    }


def find_command(argv: list[str]) -> str | None:
    """Return a command line of Slipstream without passwords; None of another program."""
    program = Path(argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.stem
    if name != "slipstream":
        return None
    return shlex.join(["slipstream", *map(mask_argument, argv[1:])])
