"""What a command may import before its first step: start-up time that users wait for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NETWORK = """
import os
import sys
from torch import nn

class Net(nn.Module):
    def __init__(self, context, inputs, static, outputs):
        super().__init__()
        self.head = nn.Linear(inputs, outputs)

    def forward(self, x, static=None):
        result = self.head(x[-1])
        if result.requires_grad:
            result.register_hook(record)
        return result

def record(gradient):
    sys.stderr.write("MODULES " + " ".join(sys.modules) + "\\n")
    sys.stderr.flush()
    os._exit(0)
"""
CONFIG = """
[data]
path = "rows.csv"
context = 4
horizon = 1

[model]
kind = "network:Net"

[train]
epochs = 1

[engine]
device = "cpu"
"""
HEAVY = {
    *("pandas", "polars", "duckdb", "scipy", "sklearn", "sympy", "matplotlib", "PIL", "jinja2"),
    *("optuna", "sqlalchemy", "ray", "lightning", "IPython", "torch._dynamo", "torch._inductor"),
    *("torch.distributed.fsdp", "torch.utils.tensorboard", "triton"),
}
"""Modules of other packages that take from a tenth of a second to several seconds to import"""
ALLOWED: set[str] = set()
"""Those that `slipstream train` imports before its first step"""
PACKAGES = {
    *("slipstream", "torch", "torchgen", "numpy", "pyarrow", "pydantic", "pydantic_core", "typer"),
    *("rich", "psutil", "pynvml", "safetensors", "tomli_w", "annotated_doc", "annotated_types"),
    *("shellingham", "typing_extensions", "typing_inspection"),
    *("cloudpickle", "dateutil", "six", "tqdm"),  # torch and Arrow import these where they are
    *("_distutils_hack", "cython_runtime", "network"),
    *("sitecustomize", "usercustomize"),  # Python itself imports these, where a system has them
}
"""The packages that it may import by then; a job that uses more imports more"""


@pytest.mark.slow
def test_train_imports_only_what_it_needs_before_its_first_step(tmp_path):
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "job.toml").write_text(CONFIG)
    rows = "".join(f"{i},{i % 7}\n" for i in range(120))
    (tmp_path / "rows.csv").write_text(f"t,y\n{rows}")
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "train", "job.toml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("MODULES ")]
    assert lines, done.stderr
    modules = set(lines[0].split()[1:])
    assert HEAVY & modules == ALLOWED
    packages = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    private = ("__", "_cython", "_sysconfigdata")
    assert {name for name in packages if not name.startswith(private)} <= PACKAGES


def test_arrow_does_without_pandas_and_others_can_still_import_it():
    code = (
        "import sys; from slipstream.data.table import avoid_pandas; avoid_pandas(); "
        "import pyarrow as pa; pa.array([1.5]).to_numpy(); assert 'pandas' not in sys.modules; "
        "import pandas; assert pa.table(pandas.DataFrame({'a': [1]})).num_rows == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def run_command(*args):
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "slipstream", *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_command_that_fails_while_torch_is_imported_keeps_its_exit_code_and_message(tmp_path):
    done = run_command("train", str(tmp_path / "absent.toml"), "--json")
    assert done.returncode == 2
    assert "there is no such config file" in done.stderr
    assert "there is no such config file" in done.stdout


def test_help_imports_no_torch():
    done = run_command("train", "--help")
    assert done.returncode == 0
    assert "Train a model" in done.stdout
    assert not any(line.endswith(" torch") for line in done.stderr.splitlines())
