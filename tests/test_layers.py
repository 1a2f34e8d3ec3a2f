"""Imports point down only, and modules of one layer do not import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import slipstream

SOURCE = Path(slipstream.__file__).parent
LAYERS = [
    {"errors", "text"},
    {"checksums"},
    {"config"},
    {"machine", "runs"},
    {"kernels"},
    {"data", "models", "objectives"},
    {"engine"},
    {"scoring"},
    {"autotune"},
    {"training", "evaluation", "prediction"},
    {"reporting"},
    {"profiling"},
    {"bench", "doctor", "probing", "tuning"},
    {"terminal"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imports_of(path: Path) -> set[str]:
    """The parts of Slipstream that a file imports, by their first name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts == ["slipstream"]:
                found |= {alias.name for alias in node.names} - {"__version__"}
            elif parts[0] == "slipstream":
                found.add(parts[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "slipstream" and len(parts) > 1}
    return found


def test_every_module_has_a_layer():
    names = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    names |= {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert names == set(RANK)


def test_imports_point_down_only():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        wrong += [
            f"{path.relative_to(SOURCE)} imports {other}"
            for other in imports_of(path) - {part}
            if RANK[other] >= RANK[part]
        ]
    assert not wrong


def test_the_upper_and_lower_layers_do_without_torch():
    code = (
        "import sys, slipstream, slipstream.cli, slipstream.config, slipstream.errors, "
        "slipstream.runs, slipstream.reporting; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
