"""LSTM and GRU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model
from slipstream.models.parts import Head, Pool, to_patches

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


class Recurrent(nn.Module):
    """Layers of one cell kind, each with its own width, dropout between them."""

    def __init__(
        self, model: Model, *, context: int, inputs: int, static: int, outputs: int
    ) -> None:
        super().__init__()
        self.patch = model.patch
        self.dropout = model.dropout
        ways = 2 if model.bidirectional else 1
        width = inputs * model.patch
        self.layers = nn.ModuleList()
        for size in model.sizes:
            self.layers.append(CELLS[model.kind](width, size, bidirectional=model.bidirectional))
            width = size * ways
        self.pool = Pool(
            model.pool, width=width, length=context // model.patch, both_ways=model.bidirectional
        )
        self.head = Head(self.pool.out, static, outputs)

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        sequence = to_patches(inputs, self.patch)
        for depth, layer in enumerate(self.layers):
            if depth and self.dropout:
                # our own between layers: cuDNN's keeps a state that cannot be saved
                sequence = F.dropout(sequence, self.dropout, self.training)
            sequence, _ = layer(sequence)
        out: Tensor = self.head(self.pool(sequence), static)
        return out
