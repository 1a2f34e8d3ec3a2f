"""Predictions of a model whose state is carried on over whole series.

Shapes: T rows of a chunk, N streams, B windows, D features.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import Signature
from slipstream.data import windows
from slipstream.data.windows import Batch, Series
from slipstream.engine import objective
from slipstream.engine.batches.source import CarriedStates
from slipstream.engine.carried import batches as carried
from slipstream.engine.carried.batches import CarriedSource, Pieces
from slipstream.engine.plan import Plan

PASS_ROWS = 1 << 16
"""Rows of all streams that are computed at a time, roughly"""


class CarriedPredictor:
    """Predicts windows after a pass over all rows before their last one, from a zero state at the
    start of each series and after each gap.

    The first call for some series computes all of their rows. What is stored of a row is the
    narrower of the model's features and its outputs.
    """

    def __init__(self, model: Any, plan: Plan, signature: Signature) -> None:
        self.model, self.plan, self.signature = model, plan, signature
        self._series: Series | None = None
        self._rows = torch.empty(0)

    def __call__(self, series: Series, starts: Tensor) -> Tensor:
        if series is not self._series:
            self._rows = self._compute_rows(series)
            self._series = series
        last = starts + self.signature.context - 1
        chosen = self._rows[last].flatten(0, 1)
        if self._stores_outputs:
            return chosen.view(-1, *self._output_shape)
        static = windows.gather_rows(series, last[None]).static
        prediction: Tensor = self.model.decode_rows(chosen, static)
        return prediction

    @property
    def _output_shape(self) -> tuple[int, int, int]:
        model = self.model
        return model.steps, model.targets, model.quantiles

    @property
    def _stores_outputs(self) -> bool:
        return bool(np.prod(self._output_shape) <= self.model.core.width)

    def _compute_rows(self, series: Series) -> Tensor:
        """Return what is stored of every row, [rows, sequences, D or outputs]."""
        assert series.segments is not None
        model, device, num_rows = self.model, series.values.device, len(series.values)
        begins, count = series.segments.cpu().numpy(), series.sequences_per_window
        length = max(PASS_ROWS // min(len(begins), carried.MAX_STREAMS), carried.MIN_ROWS)
        grid = carried.lay_out_whole(Pieces(begins, np.append(begins[1:], num_rows)), length)
        is_read = grid.weigh(np.arange(num_rows), mean=False)
        states = model.make_states(grid.num_streams * count, device)
        source = CarriedSource(series, grid, is_read, states, grid.num_streams)
        within = torch.arange(grid.rows, device=device)[:, None]
        width = int(np.prod(self._output_shape)) if self._stores_outputs else model.core.width
        stored = torch.zeros(num_rows, count, width, device=device)
        model.eval()
        for step, first in enumerate(torch.from_numpy(grid.first).to(device)):
            for batch, weights, states in source.get_micro_batches(
                torch.tensor([step], device=device)
            ):
                out = self._run(batch, states).unflatten(0, (-1, count))
                own = weights > 0
                stored[(first + within).flatten()[own]] = out[own]
        return stored

    def _run(self, batch: Batch, states: CarriedStates | None) -> Tensor:
        """Return what is stored of a batch's rows, and hand on their states."""
        assert states is not None
        with objective.autocast(self.plan):
            features, after = self.model.encode_rows(batch.inputs, states.before)
        states.after.extend(after)
        flat: Tensor = features.flatten(0, 1).float()
        if not self._stores_outputs:
            return flat
        outputs: Tensor = self.model.decode_rows(flat, batch.static).flatten(1)
        return outputs
