from __future__ import annotations

import signal

import pytest

import slipstream
from slipstream.base.errors import Interrupted, Option


def test_a_message_that_quotes_a_file_holds_no_control_characters(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("t,y\n1,2\n2,3\x00\x1b[31m\n" + "".join(f"{i},{i % 7}\n" for i in range(3, 60)))
    settings = {"data": {"path": str(path), "context": 4, "horizon": 1}, "out": str(tmp_path)}
    with pytest.raises(slipstream.UserError) as caught:
        slipstream.train(settings, quiet=True)
    assert 'rows.csv, line 3, column "y": "3\\x00\\x1b[31m" is not a number' in str(caught.value)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)]
)
def test_each_signal_has_its_exit_code(number, code):
    assert Interrupted("stopped", signal_number=number).exit_code == code


def test_a_value_with_spaces_can_be_pasted_into_a_shell():
    name = "adjusted CO2"
    assert Option("targets", name).render("terminal") == "--targets 'adjusted CO2'"
    assert Option("targets", name).render("python") == 'targets="adjusted CO2"'
    assert Option("targets", "CO2").render("terminal") == "--targets CO2"
