"""A TCN row by row: what its convolutions have seen is carried on."""

import pytest
import torch

from slipstream.models.forecaster import build
from tests.conftest import close, small_config, small_dataset


@pytest.mark.parametrize("lengths", [(30,), (1,) * 30, (7, 1, 13, 9)])
def test_rows_in_parts_equal_the_whole_sequence(lengths):
    config = small_config(model={"kind": "tcn", "layers": 3, "kernel_size": 3})
    model = build(config.model, small_dataset(config).signature).eval()
    rows = torch.randn(30, 2, 3)
    states, parts = model.make_states(2, torch.device("cpu")), []
    with torch.inference_mode():
        for part in rows.split(lengths):
            tokens, states = model.encode_rows(part, states)
            parts.append(tokens)
        close(torch.cat(parts), model.core.encode(rows))
