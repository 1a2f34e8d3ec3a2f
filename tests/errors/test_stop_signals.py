from __future__ import annotations

import signal

import pytest

from slipstream.errors import Interrupted, stop_signals


@pytest.fixture(autouse=True)
def handlers():
    """The handlers before and after a test are the same."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_warning_that_the_program_handles_itself_stays_its_own():
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("own"))
    stop_signals.leave_on_warning()
    stop_signals.raise_on_stop()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == ["own"]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert stop_signals.list_stop_signals() == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_raises_and_the_next_ones_do_not_disturb(number):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    stop_signals.raise_on_stop()
    with pytest.raises(Interrupted):
        signal.raise_signal(number)
    signal.raise_signal(number)
    stop_signals.raise_on_stop()  # the next command of this process
    with pytest.raises(Interrupted):
        signal.raise_signal(number)
