"""Networks as a user may bring them."""

from __future__ import annotations

import torch
from torch import nn


class Mixer(nn.Module):
    """Rows through a linear layer each, their mean through another."""

    def __init__(self, *, context, inputs, static, outputs, width=8):
        super().__init__()
        self.rows = nn.Linear(inputs, width)
        self.head = nn.Linear(width + static, outputs)

    def forward(self, inputs, static):
        found = torch.tanh(self.rows(inputs)).mean(dim=0)
        return self.head(found if static is None else torch.cat([found, static], dim=-1))


class Dropping(Mixer):
    """With a dropout of torch's own, which `vmap` refuses."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.drop = nn.Dropout(0.2)

    def forward(self, inputs, static):
        return self.head(self.drop(torch.tanh(self.rows(inputs)).mean(dim=0)))


class Deciding(Mixer):
    """Looks at its values on the way, which `vmap` refuses."""

    def forward(self, inputs, static):
        found = torch.tanh(self.rows(inputs)).mean(dim=0)
        if float(found.detach().abs().sum()) < 0:
            found = -found
        return self.head(found)


class Remembering(nn.Module):
    """An LSTM of torch's own, which `vmap` refuses."""

    def __init__(self, *, context, inputs, static, outputs):
        super().__init__()
        self.lstm = nn.LSTM(inputs, 12)
        self.head = nn.Linear(12, outputs)

    def forward(self, inputs, static):
        return self.head(self.lstm(inputs)[0][-1])


class Normed(Mixer):
    """Keeps running means."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs, static):
        return self.head(self.norm(torch.tanh(self.rows(inputs)).mean(dim=0)))


class TooMany(Mixer):
    def forward(self, inputs, static):
        return torch.cat([super().forward(inputs, static)] * 2, dim=-1)


class Nameless(nn.Module):
    def __init__(self):
        super().__init__()


class Fragile(Mixer):
    """From a share of all seeds it starts with weights that no training mends."""

    def __init__(self, *, share=0.0, **shape):
        lost = float(torch.rand(())) < share
        super().__init__(**shape)
        if lost:
            nn.init.constant_(self.head.weight, torch.inf)
