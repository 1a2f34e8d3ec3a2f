"""Stdout and stderr as a shell may leave them: commands end as they should, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import slipstream
from tests.cli.test_cli import sets
from tests.conftest import slow, small_config, waves

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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], slow(["--json"])])
def test_a_reader_that_has_gone_ends_the_command_in_silence(run, form):
    pipe = nobody_reads()
    words = [sys.executable, "-m", "slipstream", "report", str(run), *form]
    found = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    os.close(pipe)
    assert (found.returncode, found.stderr) == (BROKEN_PIPE, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [slow(">&-"), slow("2>&-"), "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(run, closed):
    (run / "report.html").unlink(missing_ok=True)
    found = shell(f'"$@" {closed}', "report", run)
    assert found.returncode == 0, found.stderr
    assert silent(found)
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!")


def test_an_error_with_all_streams_closed_keeps_its_exit_code(run):
    assert shell('"$@" >&- 2>&-', "report", run, "--set", "x=1", "--json").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_told(run):
    found = shell('"$@" > /dev/full', "report", run, "--json")
    assert found.returncode == 2
    assert found.stderr == "slipstream: cannot write to stdout (No space left on device)\n"
    assert shell('"$@" 2> /dev/full', "report", run).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", [slow([]), ["--json"]])
def test_an_encoding_that_lacks_characters_gets_others(run, form):
    found = shell('"$@"', "report", run, *form, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert found.returncode == 0, found.stderr
    assert found.stdout.isascii()
    assert "ber [kW]" in found.stdout
    found = shell('"$@"', "report", run / "über", *form, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert found.returncode == 2
    assert "\\xfcber: there is no such run folder" in found.stderr


def run_in_terminal(code):
    """Run Python with stderr on a terminal; return what it shows there."""
    terminal, stderr = os.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=stderr) as process:
        os.close(stderr)
        shown = b""
        with suppress(OSError):  # at its end
            while part := os.read(terminal, 1000):
                shown += part
    os.close(terminal)
    assert process.returncode == 0, shown
    return shown.decode()


PROGRESS = """
from slipstream.base.phases import report_progress
from slipstream.reporting.terminal import streams
streams.DELAY_S, streams.REFRESH_S = {delay}, 0
with streams.show_progress(quiet={quiet}):
    report_progress("reading a\\x1bb.csv", 0.25)
    report_progress("reading it", None)
    report_progress("")
    report_progress("unpacking", 0.5)
"""


def test_a_terminal_shows_progress_on_one_line_and_removes_it():
    shown = run_in_terminal(PROGRESS.format(delay=0, quiet=False))
    assert shown.split("\r") == [
        "",
        "reading a\\x1bb.csv: 25%",
        "reading it".ljust(23),
        " " * 10,
        "",
        "unpacking: 50%",
        " " * 14,
        "",
    ]
    assert run_in_terminal(PROGRESS.format(delay=60, quiet=False)) == ""
    assert run_in_terminal(PROGRESS.format(delay=0, quiet=True)) == ""


def test_a_file_gets_no_progress():
    code = PROGRESS.format(delay=0, quiet=False)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ended.stderr == b""
