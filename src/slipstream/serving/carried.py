"""Tables for a model with a carried state: a pass over every piece of a series, from a zero state.

Shapes: R rows, N windows, F inputs, K values beside the rows, H predicted rows, C targets, Q
quantiles or classes.
"""

from __future__ import annotations

import numpy as np

from slipstream.data.series import Floats, Ints
from slipstream.portable.model import PortableMember
from slipstream.portable.networks.steps import RowNetwork
from slipstream.portable.networks.windows import restore_outputs, scale_windows
from slipstream.portable.rows import NewRows, PhysicalWindows

CHUNK_ROWS = 32
"""Rows that are computed before the model's thread is free for others"""


class TablePass:
    """The rows of a table on their way through a model, up to the last window of each piece."""

    def __init__(self, member: PortableMember, rows: NewRows, starts: Ints) -> None:
        model, signature = member.first, member.first.signature
        self._model = model
        self._networks = [RowNetwork(one) for one in member.models]
        whole = PhysicalWindows(rows.inputs[None], None, None)
        self._inputs = scale_windows(whole, signature, model.scaler)[0][0]
        ends = starts + signature.context - 1
        windows = PhysicalWindows(rows.inputs[ends, None], *rows.gather_beside(starts))
        self._beside = scale_windows(windows, signature, model.scaler)[1]
        segments = rows.index.segments
        self._begins = set(segments.tolist())
        self._windows = {int(row): number for number, row in enumerate(ends)}
        owner = np.searchsorted(segments, ends, side="right") - 1
        self._rows: list[int] = [
            row
            for piece in np.unique(owner)
            for row in range(segments[piece], ends[owner == piece].max() + 1)
        ]
        self._position = 0
        shape = (len(starts), *self._networks[0].output_shape)
        self._outputs = [np.empty(shape, dtype=np.float32) for _ in self._networks]

    @property
    def is_done(self) -> bool:
        return self._position == len(self._rows)

    def advance(self) -> None:
        """Compute the next rows; one thread does at a time."""
        for row in self._rows[self._position : self._position + CHUNK_ROWS]:
            if row in self._begins:
                self._states = [one.start() for one in self._networks]
            window = self._windows.get(row)
            for i, (network, state) in enumerate(zip(self._networks, self._states, strict=True)):
                features = network.encode(self._inputs[row], state)
                if window is not None:
                    beside = None if self._beside is None else self._beside[window]
                    self._outputs[i][window] = network.decode(features, beside)
            self._position += 1

    def finish(self) -> Floats:
        """Return the windows' predictions as the graph of windows has them: [N, H, C], with
        quantiles behind, or [N, H, Q] of classes."""
        values = restore_outputs(self._outputs, self._model.signature, self._model.scaler)
        signature = self._model.signature
        return values if signature.classes or signature.quantiles else values[..., 0]
