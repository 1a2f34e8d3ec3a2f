from __future__ import annotations

import numpy as np

from slipstream.reporting.plots.predictions import draw_classes


def summary(classes, **window):
    counts = (10 * np.eye(len(classes)) + 1).astype(int).tolist()
    one = {"low": 0.5, "high": 0.6, "count": 3, "confidence": 0.55, "accuracy": 0.5}
    worst = {"series": "s", "time": None, "row": 1234, "label": classes[0], "p_label": 0.1}
    worst |= {"predicted": classes[1], "inputs": {"x": [1.0, 1.0], "y": [0.0, 2.0]}} | window
    test = {"confusion": counts, "reliability": [one], "worst": [worst]}
    return {"classes": classes, "detail": {"test": test}}


def test_few_classes_are_a_table_and_many_are_shades():
    few = draw_classes(summary(["<down>", "up"]))["confusion"]
    assert "&lt;down&gt;" in few
    assert "92 %" in few
    many = draw_classes(summary([f"class {i}" for i in range(30)]))["confusion"]
    assert "<table" not in many
    assert many.count("fill-opacity") >= 1


def test_a_window_that_was_misclassified_shows_its_inputs():
    ((title, chart),) = draw_classes(summary(["down", "up"]))["worst"]
    assert title == "s · row 1,234 · label down (10.0 %), predicted up"
    assert "y 0 to 2" in chart
