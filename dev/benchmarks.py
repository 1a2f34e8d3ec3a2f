"""Writes docs/benchmarks.md from the records, so that the two cannot differ.

python dev/benchmarks.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks" / "records"
INTRO = """# Benchmarks

What was measured, where, record by record; each folder under `benchmarks/records/` has every
repeat. Machines are shared and noisy: compare ways within one record, not times across records.
Yours will differ: `slipstream bench ladder`, `parity` and `peers` measure the same on your
machine. This page is made from the records by `make docs`.
"""


def records() -> list[Path]:
    return sorted(path.parent for path in RECORDS.glob("*/summary.md"))


def page() -> str:
    parts = [INTRO]
    texts = {folder: (folder / "summary.md").read_text(encoding="utf-8") for folder in records()}
    for folder, text in texts.items():
        title = text.split("\n", 1)[0].removeprefix("# ")
        parts.append(f"- [{folder.name}](#{anchor(folder.name)}): {title}")
    for folder, text in texts.items():
        rest = text.split("\n", 1)
        title, body = rest[0].removeprefix("# "), rest[1].strip()
        parts += ["", f"## {folder.name}", "", f"**{title}**", ""]
        parts += [
            f"![{picture.stem}](../benchmarks/records/{folder.name}/{picture.name})\n"
            for picture in sorted(folder.glob("*.png"))
        ]
        parts.append(re.sub(r"^#", "##", body, flags=re.MULTILINE))
    return "\n".join(parts) + "\n"


def anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9-]", "", name.lower())


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else "run `make docs`")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
