"""Stdout and stderr as a shell may leave them: commands end as they should, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from tests.conftest import slow, small_config, waves
from tests.test_cli import sets

BROKEN_PIPE = 141


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("streams") / "über [kW]"
    return slipstream.train(small_config(out, model={"kind": "linear"}), waves(200)).run


def shell(text, *arguments, **environment):
    """Run a line of shell, whose "$@" is the command and `$code` its exit code."""
    words = [sys.executable, "-m", "slipstream", *map(str, arguments)]
    script = ["sh", "-c", text, "sh", *words]
    return subprocess.run(
        script, capture_output=True, text=True, check=False, env=os.environ | environment
    )


def nobody_reads():
    """A pipe's end to write to, whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def silent(found):
    return "Traceback" not in found.stderr and "fault" not in found.stderr


def test_a_training_into_a_pipe_that_nobody_reads_loses_nothing(tmp_path):
    waves(200).to_pandas().to_csv(tmp_path / "table.csv", index=False)
    (tmp_path / "job.toml").write_text(f'out = "{tmp_path}/runs"\n[data]\npath = "table.csv"\n')
    pipe = nobody_reads()
    words = [sys.executable, "-m", "slipstream", "train", str(tmp_path / "job.toml"), *sets()]
    found = subprocess.run(words, stdout=pipe, stderr=pipe, check=False)
    os.close(pipe)
    assert found.returncode == BROKEN_PIPE
    (run,) = (tmp_path / "runs").iterdir()
    for name in ("metrics.json", "predictions.parquet", "report.html", "model/manifest.json"):
        assert (run / name).exists()
    assert not (run / "crash.txt").exists()


@pytest.mark.parametrize("form", [[], slow(["--json"])])
def test_a_reader_that_has_gone_ends_the_command_in_silence(run, form):
    pipe = nobody_reads()
    words = [sys.executable, "-m", "slipstream", "report", str(run), *form]
    found = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    os.close(pipe)
    assert (found.returncode, found.stderr) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("closed", [slow(">&-"), slow("2>&-"), "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(run, closed):
    (run / "report.html").unlink(missing_ok=True)
    found = shell(f'"$@" {closed}', "report", run)
    assert found.returncode == 0, found.stderr
    assert silent(found)
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!")


def test_an_error_with_all_streams_closed_keeps_its_exit_code(run):
    assert shell('"$@" >&- 2>&-', "report", run, "--set", "x=1", "--json").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_told(run):
    found = shell('"$@" > /dev/full', "report", run, "--json")
    assert found.returncode == 2
    assert found.stderr == "slipstream: cannot write to stdout (No space left on device)\n"
    assert shell('"$@" 2> /dev/full', "report", run).returncode == 0


@pytest.mark.parametrize("form", [slow([]), ["--json"]])
def test_an_encoding_that_lacks_characters_gets_others(run, form):
    found = shell('"$@"', "report", run, *form, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert found.returncode == 0, found.stderr
    assert found.stdout.isascii()
    assert "ber [kW]" in found.stdout
    found = shell('"$@"', "report", run / "über", *form, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert found.returncode == 2
    assert "\\xfcber: there is no such run folder" in found.stderr
