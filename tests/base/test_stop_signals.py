from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time

import pytest

from slipstream.base import signals
from slipstream.base.errors import Interrupted


@pytest.fixture(autouse=True)
def handlers():
    """The handlers before and after a test are the same."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_warning_that_the_program_handles_itself_stays_its_own():
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("own"))
    signals.leave_on_warning()
    signals.raise_on_stop()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == ["own"]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signals.list_stop_signals() == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_raises_and_the_next_ones_do_not_disturb(number):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signals.raise_on_stop()
    with pytest.raises(Interrupted):
        signal.raise_signal(number)
    signal.raise_signal(number)
    signals.raise_on_stop()  # the next command of this process
    with pytest.raises(Interrupted):
        signal.raise_signal(number)


def test_ctrl_c_raises_where_the_parent_ignores_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.accept_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signals.ignore)  # a program's own handler stays
    signals.accept_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signals.ignore


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Interrupted)]
)
def test_a_signal_during_an_import_acts_when_that_is_over(tmp_path, monkeypatch, number, raised):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"interrupted_by_{number.name}"
    (tmp_path / f"{name}.py").write_text(
        f"import signal, time\nsignal.raise_signal({int(number)})\n"
        "time.sleep(0.1)\nis_complete = True\n"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.accept_ctrl_c()
    signals.raise_on_stop()

    def load():
        importlib.import_module(name)
        while True:
            time.sleep(0.01)

    with pytest.raises(raised):
        load()
    assert sys.modules.pop(name).is_complete


def test_a_second_ctrl_c_during_an_import_ends_the_process(tmp_path):
    (tmp_path / "hanging.py").write_text(
        "import signal, time\nfor _ in range(2):\n    signal.raise_signal(signal.SIGINT)\n"
        "time.sleep(1e6)\n"
    )
    code = "from slipstream.base import signals; signals.accept_ctrl_c(); import hanging"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
    assert subprocess.run([sys.executable, "-c", path + code], check=False).returncode == 130
