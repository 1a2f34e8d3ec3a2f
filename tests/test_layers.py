"""The packages in their order: imports point down only. And what does without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import slipstream

SOURCE = Path(slipstream.__file__).parent
ORDER = [
    *("base", "events", "config", "runs", "kernels", "data", "models", "engine", "workers"),
    *("scoring", "inference", "training", "reporting", "exporting", "search", "tools"),
    *("server", "app", "api", "cli"),
]
"""The packages, the lowest first; a package imports those before it"""


def find_imports(path: Path) -> set[str]:
    """Name the packages of Slipstream that a file imports, anywhere in the file."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    names = {module.split(".")[1] for module in modules if module.startswith("slipstream.")}
    return names & set(ORDER)


def test_every_package_has_its_rank():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ORDER)


def test_imports_point_down_only():
    wrong = []
    for path in SOURCE.glob("*/**/*.py"):
        package = path.relative_to(SOURCE).parts[0]
        above = ORDER[ORDER.index(package) + 1 :]
        wrong += [f"{path} imports {name}" for name in find_imports(path) & set(above)]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_the_api_and_the_report_start_without_torch():
    code = (
        "import sys, slipstream, slipstream.cli, slipstream.config, slipstream.base.errors, "
        "slipstream.api.training, slipstream.api.inference, slipstream.api.results, "
        "slipstream.api.estimator, slipstream.api.model, "
        "slipstream.runs, slipstream.reporting.page; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trained_model_predicts_without_torch():
    """A server and a device without torch import these modules."""
    code = (
        "import sys, slipstream.inference.portable, slipstream.inference.networks, "
        "slipstream.inference.rows, slipstream.inference.stream, slipstream.models.shapes, "
        "slipstream.models.kinds.mlp, slipstream.models.kinds.recurrent, "
        "slipstream.models.kinds.tcn, slipstream.models.kinds.transformer, "
        "slipstream.data.filters, slipstream.data.predictions; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
