"""What `slipstream export --to c` writes for trained runs, on this machine and on a Cortex-M4F."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli.commands import app
from slipstream.exporting.c.files import ARM_COMPILER, ARM_FLAGS, FLAGS
from slipstream.training import train
from tests.conftest import small_config, waves
from tests.exporting.c.programs import needs_compiler

STARTUP = """
extern void _start(void);
static void reset(void)
{
    *(volatile unsigned *)0xE000ED88u |= 0xFu << 20; /* turn the FPU on */
    __asm volatile("dsb\\n isb");
    _start();
}
__attribute__((section(".vectors"), used)) static void (*const vectors[])(void) = {
    (void (*)(void))0x20400000, reset};
"""
"""What a Cortex-M starts with: the top of the stack, and the reset handler"""
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    pa.csv.write_csv(waves(160), path / "waves.csv")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """An LSTM of one target, behind a filter and a formula, with a filter of its predictions."""
    steps = [
        {"step": "filter", "kind": "ema", "columns": ["a"], "rows": 4, "into": ["slow"]},
        {"step": "formula", "name": "power", "value": "b * lag(c, 1)"},
    ]
    data = {
        "path": str(folder / "waves.csv"),
        "horizon": 0,
        "prepare": steps,
        "inputs": ["a", "slow", "power"],
        "targets": ["c"],
    }
    predict = {"filter": {"kind": "ema", "rows": 3}}
    return train(small_config(folder / "runs", data=data, predict=predict)).run


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    """An MLP with two repeats, whose mean predicts with intervals."""
    sections: dict[str, Any] = {"model": {"kind": "mlp"}, "train": {"repeats": 2, "epochs": 1}}
    return train(
        small_config(folder / "runs", data={"path": str(folder / "waves.csv")}, **sections)
    ).run


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    slipstream.export(run, to="c", out=out, name="soc")
    return out


def invoke(*args: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["export", *map(str, args), "--to", "c", "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_an_export_holds_the_source_its_header_and_a_self_test(run, exported):
    saved = json.loads((exported / "export.json").read_text())
    assert {file["name"] for file in saved["files"]} == {"soc.c", "soc.h", "main.c"}
    assert saved["parity"]["max_rel"] <= 1e-5
    assert saved["prepare"]["max_rel"] <= 1e-5
    assert saved["prepare"]["rows"] == 160
    assert saved["selftest"].endswith("ok")
    assert saved["before"] == []
    header = (exported / "soc.h").read_text()
    assert (
        "Inside soc_step, in double: data.prepare, step 1 (filter); data.prepare, step 2" in header
    )
    assert f"from the run {run.name}" in header


def test_a_step_filters_its_predictions_as_predict_does(run, folder, tmp_path):
    expected = slipstream.predict(run, folder / "waves.csv").to_pydict()["c_predicted"]
    rows = waves(160).select(["a", "b", "c"]).to_pydict()
    numbers = ", ".join(
        f"{value!r}" for row in zip(rows["a"], rows["b"], rows["c"], strict=True) for value in row
    )
    (tmp_path / "main.c").write_text(
        f"""#include <stdio.h>
        #include "soc.h"
        static const soc_value rows[160][SOC_COLUMNS] = {{{numbers}}};
        int main(void) {{
            soc_value out[SOC_OUTPUTS];
            int i;
            soc_reset();
            for (i = 0; i < 160; i++)
                if (soc_step(rows[i], out)) printf("%.9g\\n", (double)out[0]);
            return 0;
        }}"""
    )
    windows = tmp_path / "windows"
    slipstream.export(run, to="c", out=windows, name="soc", state="windows")
    files = [str(windows / "soc.c"), str(tmp_path / "main.c"), f"-I{windows}", "-lm"]
    subprocess.run(["cc", "-std=c99", "-O1", *files, "-o", str(tmp_path / "test")], check=True)
    done = subprocess.run([str(tmp_path / "test")], check=True, capture_output=True, text=True)
    values = [float(line) for line in done.stdout.split()]
    assert len(values) == len(expected)
    assert values == pytest.approx(expected, rel=1e-5)


def test_several_networks_and_their_intervals_are_verified(plain, tmp_path):
    code, result = invoke(plain, "--out", tmp_path / "out", "--ensemble")
    assert code == 0
    assert result["state"] == "windows"
    assert result["parity"]["others"].keys() == {"slip_step"}
    header = (tmp_path / "out" / "slip.h").read_text()
    assert "the mean of 2 networks" in header
    assert "void slip_interval_95(" in header


def test_int8_states_its_loss_of_test_error(plain, tmp_path):
    code, result = invoke(plain, "--out", tmp_path / "out", "--int8")
    assert code == 0
    loss = result["parity"]["loss"]
    assert abs(loss["export"] / loss["model"] - 1) == pytest.approx(abs(loss["relative"]))
    assert loss["relative"] <= loss["limit"]
    assert "int8 with a scale for each row" in (tmp_path / "out" / "slip.h").read_text()


def test_without_a_compiler_nothing_is_written(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    code, result = invoke(plain, "--out", tmp_path / "out")
    assert code == 2
    assert "there is no C compiler" in result["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--name", "1st"), '--name is "1st"'),
        (("--state", "kept"), "it should be carried or windows"),
        (("--license", "mit"), "--license is for --to hub"),
    ],
)
def test_wrong_options_are_refused(plain, tmp_path, options, problem):
    code, result = invoke(plain, "--out", tmp_path / "out", *options)
    assert code == 2
    assert problem in result["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason="there is no compiler for Cortex-M")
def test_it_compiles_for_a_cortex_m4f_and_the_sizes_are_reported(exported):
    saved = json.loads((exported / "export.json").read_text())["sizes"]
    assert saved["cortex_m4_flash_bytes"] > saved["flash_bytes"]
    assert saved["cortex_m4_ram_bytes"] == saved["scratch_bytes"] + saved["state_bytes"]
    result = CliRunner().invoke(app, ["export", "--help"])
    assert "--int8" in result.stdout


@pytest.mark.skipif(
    not all(map(shutil.which, (ARM_COMPILER, "qemu-system-arm"))),
    reason="there is no compiler for Cortex-M, or no emulator",
)
def test_the_self_test_passes_on_an_emulated_cortex_m4f(exported, tmp_path):
    (tmp_path / "startup.c").write_text(STARTUP)
    program = tmp_path / "test.elf"
    files = [tmp_path / "startup.c", exported / "soc.c", exported / "main.c"]
    link = ["--specs=rdimon.specs", "-Wl,--section-start=.vectors=0", "-lm", "-o", str(program)]
    strict = [flag for flag in FLAGS if flag != "-pedantic"]  # the start-up code is not C99
    command = [ARM_COMPILER, *strict, "-std=gnu99", *ARM_FLAGS, *map(str, files), *link]
    subprocess.run(command, check=True)
    machine = ["-M", "mps2-an386", "-nographic"]
    semihosting = ["-semihosting-config", "enable=on,target=native"]
    done = subprocess.run(
        ["qemu-system-arm", *machine, *semihosting, "-kernel", str(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith("ok")
