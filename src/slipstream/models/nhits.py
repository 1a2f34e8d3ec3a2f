"""N-HiTS: stacks of MLPs that read a window at several rates, the coarsest first.

After Challu et al. (2023), with one block per stack. A stack pools the rows of the window and
returns a few coefficients, which are interpolated: those of the backcast are subtracted from the
window that the next stack reads, those of the forecast are added to the outputs. The last stack has
the rate 1. Its forecast has one coefficient per output, so that it is a head like that of the other
networks, which reads static columns and rows known ahead as well.

Shapes: B windows, F inputs, T context rows, N coefficients, D width of the last layer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model
from slipstream.models.kinds.nhits import count_groups, list_rates, make_interpolation
from slipstream.models.layers import NO_FUTURE, Head, apply_linear
from slipstream.models.mlp import ACTIVATIONS
from slipstream.models.noise import Noise, dropout


class NHiTS(nn.Module):
    """Stacks of MLPs over the pooled window, and the head of the last one."""

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        inputs: int,
        static: int,
        outputs: int,
        steps: int,
        future: tuple[int, int] = NO_FUTURE,
    ) -> None:
        super().__init__()
        rates, self.layers = list_rates(model), len(model.sizes)
        self.stacks = nn.ModuleList(Stack(model, rate, context, inputs) for rate in rates)
        self.coarse = nn.ModuleList(
            CoarseOutputs(model.sizes[-1], rate, (context, inputs), (steps, outputs // steps))
            for rate in rates[:-1]
        )
        self.head = Head(model.sizes[-1], static, outputs, future)

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        rows = inputs.permute(1, 2, 0)  # [B, F, T]
        forecasts = []
        for number, stack in enumerate(self.stacks):
            hidden = stack(rows, noise, number * self.layers)
            if number < len(self.coarse):
                backcast, forecast = self.coarse[number](hidden)
                rows = rows - backcast
                forecasts.append(forecast.transpose(1, 2).flatten(1))
        out: Tensor = self.head(hidden, static)
        for forecast in forecasts:
            out = out + forecast
        return out


class Stack(nn.Module):
    """The hidden layers of a stack, over the window [B, F, T] at its rate."""

    def __init__(self, model: Model, rate: int, context: int, inputs: int) -> None:
        super().__init__()
        self.rate, self.activation = rate, ACTIVATIONS[model.activation]
        widths = [count_groups(context, rate) * inputs, *model.sizes]
        self.layers = nn.ModuleList(
            nn.Linear(width, size) for width, size in zip(widths[:-1], model.sizes, strict=True)
        )

    def forward(self, rows: Tensor, noise: Noise | None, site: int) -> Tensor:
        """Return features [B, D]; sites from `site` on are reserved for dropout."""
        hidden = pool_rows(rows, self.rate).flatten(1)
        for depth, layer in enumerate(self.layers):
            hidden = dropout(self.activation(apply_linear(layer, hidden)), noise, site + depth)
        return hidden


class CoarseOutputs(nn.Module):
    """The backcast [B, F, T] and the forecast [B, outputs of a row, rows] of features [B, D]."""

    def __init__(
        self, width: int, rate: int, window: tuple[int, int], horizon: tuple[int, int]
    ) -> None:
        super().__init__()
        self.backcast = Interpolation(width, rate, *window)
        self.forecast = Interpolation(width, rate, *horizon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.backcast(hidden), self.forecast(hidden)


class Interpolation(nn.Linear):
    """A linear layer to one coefficient for `rate` rows, interpolated to [B, columns, rows]."""

    table: Tensor

    def __init__(self, width: int, rate: int, rows: int, columns: int) -> None:
        count = count_groups(rows, rate)
        super().__init__(width, columns * count)
        table = torch.from_numpy(make_interpolation(count, rows))
        self.register_buffer("table", table, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        coefficients = apply_linear(self, hidden)
        out: Tensor = coefficients.unflatten(-1, (-1, len(self.table))) @ self.table
        return out


def pool_rows(rows: Tensor, rate: int) -> Tensor:
    """Return the mean of each group of `rate` rows, [B, F, T] to [B, F, T / rate]; rows that the
    first group lacks count as zero.

    The paper takes the largest value. On ETTh1 and the Beijing PM2.5 data the mean is as good or
    better, and it takes fewer kernels in the backward pass."""
    length = rows.shape[-1]
    rate = min(rate, length)
    if rate == 1:
        return rows
    if missing := -length % rate:
        rows = F.pad(rows, (missing, 0))
    groups: Tensor = rows.unflatten(-1, (-1, rate))
    return groups.mean(dim=-1)
