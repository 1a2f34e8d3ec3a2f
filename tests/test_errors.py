from __future__ import annotations

import signal

import pytest

import slipstream
from slipstream import errors
from slipstream.errors import Interrupted


def test_a_message_that_quotes_a_file_holds_no_control_characters(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("t,y\n1,2\n2,3\x00\x1b[31m\n" + "".join(f"{i},{i % 7}\n" for i in range(3, 60)))
    settings = {"data": {"path": str(path), "context": 4, "horizon": 1}, "out": str(tmp_path)}
    with pytest.raises(slipstream.UserError) as caught:
        slipstream.train(settings, quiet=True)
    assert 'rows.csv, line 3, column "y": "3\\x00\\x1b[31m" is not a number' in str(caught.value)


@pytest.fixture(autouse=True)
def handlers():
    """The handlers before and after a test are the same."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)]
)
def test_each_signal_has_its_exit_code(number, code):
    assert Interrupted("stopped", signal_number=number).exit_code == code


def test_a_warning_that_the_program_handles_itself_stays_its_own():
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("own"))
    errors.leave_on_warning()
    errors.raise_on_stop()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == ["own"]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert errors.list_stop_signals() == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_raises_and_the_next_ones_do_not_disturb(number):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    errors.raise_on_stop()
    with pytest.raises(Interrupted):
        signal.raise_signal(number)
    signal.raise_signal(number)
    errors.raise_on_stop()  # the next command of this process
    with pytest.raises(Interrupted):
        signal.raise_signal(number)
