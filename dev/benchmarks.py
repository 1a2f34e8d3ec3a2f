"""Write docs/benchmarks.md, a table of all records, from `benchmarks/records/*/record.toml`.

python dev/benchmarks.py [--check]
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks" / "records"
INTRO = """# Benchmarks

Each row is one measurement. Its folder holds every repeat (`results.json`, mostly also
`results.csv`), a `summary.md` and `record.toml`, from which `make docs` builds this table. The
machines are shared and noisy: compare the methods within one record, not times across records. To
measure on your machine, run `slipstream bench ladder`, `parity` or `peers`.

Ratios are speed-ups over the column "compared with", unless the result says otherwise. "Lightning
at its best" is the fastest of nine combinations of precision and workers, without logging or
clipping. Standard cases on a GPU: **A** bidirectional LSTM 128 x 2, 105 rows, batch 512; **B** LSTM
64 x 2, 24 rows, batch 256; **C** LSTM 128, 400 rows, batch 200; **D** LSTM 128, 150 rows, batch
256; **GRU** 64 x 2, 24 rows, batch 256; **MLP** 128/96/64, 20 rows, batch 512; **Transformer** 128
x 3, 8 heads, 20 rows, batch 256. On a CPU the standard cases are smaller (see the record).

| date | hardware | what | compared with | result | record |
|---|---|---|---|---|---|
"""
KEYS = ("what", "peer", "result")
DEVICES = {"h200": "NVIDIA H200", "arm": "2 Arm cores", "x86": "2 x86 cores"}
"""By the word after the date in a folder's name"""


def list_records() -> list[Path]:
    """Return the folders of all records, oldest first."""
    return sorted(path for path in RECORDS.iterdir() if path.is_dir())


def read_record(folder: Path) -> dict[str, str]:
    """Read a record's description; without a record.toml, take the title of its summary."""
    path = folder / "record.toml"
    if not path.exists():
        title = (folder / "summary.md").read_text(encoding="utf-8").partition("\n")[0]
        return {"what": title.removeprefix("# "), "peer": "", "result": ""}
    record = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(record) != set(KEYS):
        raise ValueError(f"{path}: has the keys {sorted(record)}; expected {sorted(KEYS)}")
    return record


def read_torch_version(folder: Path) -> str:
    path = folder / "results.json"
    results: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    hardware = results.get("hardware", {}) if isinstance(results, dict) else {}
    return str(hardware.get("torch", "")).partition("+")[0]


def describe_hardware(folder: Path) -> str:
    word = folder.name.split("-")[3]
    if word == "simulated":  # on no hardware at all
        return "simulation"
    device = DEVICES.get(word, word)
    version = read_torch_version(folder)
    return f"{device}, torch {version}" if version else device


def page() -> str:
    rows = []
    for folder in list_records():
        record, date = read_record(folder), folder.name[:10]
        link = f"[{folder.name[11:]}](../{folder.relative_to(ROOT).as_posix()}/summary.md)"
        cells = (date, describe_hardware(folder), *(record[key] for key in KEYS), link)
        rows.append(f"| {' | '.join(cell.replace('|', '/') or '–' for cell in cells)} |")
    return INTRO + "\n".join(rows) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else "run `make docs`")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
