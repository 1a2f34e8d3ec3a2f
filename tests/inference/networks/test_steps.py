"""Row after row with a carried state: the same as a window of all rows so far."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from slipstream import UserError
from slipstream.inference.networks import RowNetwork, predict_scaled
from tests.conftest import close
from tests.inference.networks.test_windows import draw_models, make_pair

CARRIED = {"pool": "last", "patch": 1, "normalize": "none"}


@hypothesis.settings(max_examples=40)
@hypothesis.given(draw_models(), st.sampled_from(["lstm", "gru", "tcn"]))
def test_rows_predict_as_a_window_of_all_rows_so_far(drawn, kind):
    model, signature = drawn
    recurrent = kind != "tcn"
    model = model | CARRIED | {"kind": kind, "hidden": 8, "layers": 2, "bidirectional": False}
    model["layer_norm"] = recurrent and model.get("layer_norm", False)
    _, portable = make_pair(model, signature, 0)
    draw = np.random.default_rng(1)
    rows = draw.standard_normal((11, len(signature.inputs))).astype(np.float32)
    static = None
    if signature.static_width:
        static = draw.standard_normal(signature.static_width).astype(np.float32)
    network = RowNetwork(portable)
    state, found, wanted = network.start(), [], []
    for count, row in enumerate(rows, start=1):
        found.append(network.step(row, static, state))
        beside = None if static is None else static[None]
        wanted.append(predict_scaled(portable, rows[None, :count], beside)[0])
    # all at once: a single prediction may be a difference of numbers that are much larger
    close(np.stack(found), np.stack(wanted))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "transformer"}, "reads a window as a whole"),
        ({"kind": "mlp"}, "reads a window as a whole"),
        ({"kind": "gru", "bidirectional": True}, "backwards too"),
        ({"kind": "lstm", "pool": "mean"}, "needs all rows"),
        ({"kind": "lstm", "patch": 2}, "one token of several rows"),
        ({"kind": "tcn", "normalize": "last"}, "computed from each window"),
    ],
)
def test_what_needs_whole_windows_is_refused_with_the_reason(changes, reason, signature):
    _, portable = make_pair({"hidden": 8, "layers": 1} | changes, signature, 0)
    with pytest.raises(UserError, match=reason):
        RowNetwork(portable)
