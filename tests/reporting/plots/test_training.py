from __future__ import annotations

from dataclasses import replace

from slipstream.reporting.plots import training
from tests.reporting.monitor_sample import ON_CPU, SAMPLE


def test_the_machine_is_plotted_from_ten_samples_on():
    assert training._draw_machine([]) is None
    assert training._draw_machine([SAMPLE] * 9 + [replace(SAMPLE, seconds=0.1)]) is None
    drawn = training._draw_machine([SAMPLE] * 10)
    assert all(text in drawn for text in ("GPU busy", "power, W", "GPU memory", "seconds"))
    drawn = training._draw_machine([SAMPLE, *[ON_CPU] * 400])
    assert all(text in drawn for text in ("CPU cores busy", "memory, GB", "minutes"))
    assert "power" not in drawn
