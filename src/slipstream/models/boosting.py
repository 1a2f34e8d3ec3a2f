"""Gradient-boosted trees on the features of a window: predictions in PyTorch.

`scoring/boosting.py` fits them, as the baseline gbm of every run; `models/kinds/boosting.py` has
the same without torch. Sums are in double precision and features are rounded to float32, so that
all of them compare the same numbers with the thresholds of the trees.

Shapes: T context rows, B windows or sequences, F inputs, H predicted rows, C targets, D features,
K outputs, U columns known ahead, M trees, S splits and L leaves of a tree, Q classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.config import Model
from slipstream.kernels import native_trees, should_use_triton
from slipstream.models.kinds.boosting import (
    FEATURES,
    MAX_FEATURES,
    TREES_AT_ONCE,
    TreeOptions,
    count_pooled,
)
from slipstream.models.layers import NO_FUTURE
from slipstream.models.noise import Noise

MEAN = FEATURES.index("mean")


@dataclass(frozen=True)
class Boosting:
    """The conversion of windows to features, and of outputs to predictions, and the trees."""

    layout: tuple[tuple[int, int], ...]
    """The number in `FEATURES` of each feature of an input, and its number of rows"""
    columns: Tensor
    """Inputs that features are made of"""
    anchor: tuple[float, ...]
    """What predictions are relative to: shares of the last value, the context's mean, the last
    season and the mean season; all 0 where no target is an input"""
    period: int
    """Rows of the season; 0 without one"""
    future: int
    """U; these columns are the first inputs"""
    basis: Tensor
    """[K, H * C], or of classes [K, H]: the share of each output in each prediction"""
    mean: Tensor
    """[H * C]: the prediction, relative to the anchor, where all outputs are 0"""
    trees: Mapping[str, Tensor]

    def to_state(self) -> dict[str, Tensor]:
        """Return it as tensors alone."""
        numbers = {
            name: torch.tensor(getattr(self, name))
            for name in ("layout", "anchor", "period", "future")
        }
        tensors = {name: getattr(self, name) for name in ("columns", "basis", "mean")}
        return numbers | tensors | {f"trees.{name}": values for name, values in self.trees.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Boosting:
        return cls(
            layout=tuple((kind, rows) for kind, rows in state["layout"].tolist()),
            columns=state["columns"],
            anchor=tuple(state["anchor"].tolist()),
            period=int(state["period"]),
            future=int(state["future"]),
            basis=state["basis"],
            mean=state["mean"],
            trees={
                name.removeprefix("trees."): values
                for name, values in state.items()
                if name.startswith("trees.")
            },
        )

    def to(self, device: torch.device) -> Boosting:
        """Return it with all tensors on a device."""
        tensors = {name: getattr(self, name).to(device) for name in ("columns", "basis", "mean")}
        trees = {name: values.to(device) for name, values in self.trees.items()}
        return replace(self, **tensors, trees=trees)

    def build(self, inputs: Tensor, static: Tensor | None, ahead: Tensor | None) -> Tensor:
        """Return features [B, D] float32 of inputs [T, B, F], the static columns and the rows
        known ahead [B, H, U]."""
        rows = inputs.index_select(2, self.columns)
        newest = rows[-1]
        # a forecast is of changes, and so are its features
        changes = rows - newest if any(self.anchor) else rows
        means = _compute_means(changes, [rows for kind, rows in self.layout if kind == MEAN])
        parts = []
        for kind, length in self.layout:
            match FEATURES[kind]:
                case "last":
                    parts.append(newest)
                case "row":
                    parts.append(changes[-length])
                case "mean":
                    parts.append(means[length])
                case "deviation":
                    parts.append(rows.double().std(dim=0, correction=0))
                case "least":
                    parts.append(changes.amin(dim=0))
                case "most":
                    parts.append(changes.amax(dim=0))
        parts += [] if static is None else [static]
        if ahead is not None:
            rows_ahead, columns = ahead.shape[1:]
            exact = ahead.double()
            pooled = count_pooled((rows_ahead, columns))
            parts += [part.mean(dim=1) for part in exact.split(pooled, dim=1)]
            shares = self.basis.double().view(len(self.basis), rows_ahead, -1).mean(dim=2).float()
            if len(shares) < rows_ahead:  # else an output is a row, whose numbers are features
                parts.append(torch.einsum("bhu,kh->bku", exact, shares.double()).flatten(1))
        return torch.cat([part.float() for part in parts], dim=1)

    def compute_anchor(self, inputs: Tensor, steps: int, targets: int) -> Tensor:
        """Return the numbers that predictions are relative to, [B, H, C]."""
        past = inputs[..., inputs.shape[2] - targets :]
        choices = list_anchors(past, steps, self.period if any(self.anchor[2:]) else 0)
        # without a season there are fewer choices, and the other shares are 0
        pairs = zip(self.anchor, choices, strict=False)
        parts = [share * choice for share, choice in pairs if share]
        return sum(parts[1:], parts[0]) if parts else past.new_zeros(past.shape[1], steps, targets)

    def predict_outputs(self, features: Tensor) -> Tensor:
        """Return the sums of the trees, [B, D] to [B, K] float64; of classes [B, K * Q]."""
        if native_trees.is_supported(features, self.trees):
            return native_trees.add_leaves(features, self.trees, self.trees["level"])
        if should_use_triton(features) and not torch._C._functorch.is_functorch_wrapped_tensor(
            features
        ):
            from slipstream.kernels import boosted_trees  # Triton is installed where CUDA is

            return boosted_trees.add_leaves(features, self.trees, self.trees["level"])
        outputs = self.trees["level"].double().expand(features.shape[0], -1)
        by_feature = features.T.contiguous()
        for first in range(0, len(self.trees["output"]), TREES_AT_ONCE):
            block = slice(first, first + TREES_AT_ONCE)
            # A leaf is reached where all splits on its path go to its side: as a product of
            # matrices that is faster than going down the trees by indices.
            values = by_feature[self.trees["feature"][block].long()]  # [M, S, B]
            is_left = (values <= self.trees["threshold"][block, :, None]).float()
            agreed = torch.bmm(self.trees["path"][block].float().transpose(1, 2), is_left)
            is_leaf = (agreed == self.trees["lefts"][block, :, None]).float()  # [M, L, B]
            reached = torch.bmm(self.trees["value"][block, None], is_leaf)[:, 0]  # [M, B]
            numbers, sums = self.trees["output"][block], reached.T.double()
            if features.is_cuda:  # whose index_add adds in any order
                owners = numbers[:, None] == torch.arange(outputs.shape[1], device=sums.device)
                outputs = outputs + sums @ owners.double()
            else:
                outputs = outputs.index_add(1, numbers, sums)
        return outputs

    def predict(
        self,
        inputs: Tensor,
        static: Tensor | None,
        ahead: Tensor | None,
        shape: tuple[int, int, int],
    ) -> Tensor:
        """Return predictions [B, H, C, 1], or of classes logits [B, H, 1, Q]; `shape` is H, C and
        Q, which is 1 for numbers."""
        steps, targets, classes = shape
        outputs, basis = (
            self.predict_outputs(self.build(inputs, static, ahead)),
            self.basis.double(),
        )
        if classes > 1:
            by_row = outputs.unflatten(1, (len(basis), classes))
            return torch.einsum("bkq,kh->bhq", by_row, basis)[:, :, None].float()
        relative = (self.mean + outputs @ basis).float().unflatten(1, (steps, targets))
        predicted: Tensor = relative + self.compute_anchor(inputs, steps, targets)
        return predicted[..., None]


def _compute_means(rows: Tensor, lengths: Sequence[int]) -> dict[int, Tensor]:
    """Return the means over so many of the last rows, by their number: [T, B, F] to [B, F]."""
    means, total, done = {}, rows.new_zeros(rows.shape[1:], dtype=torch.float64), 0
    for length in sorted(lengths):
        total = total + rows[len(rows) - length : len(rows) - done].sum(0, dtype=torch.float64)
        means[length], done = (total / length).float(), length
    return means


def list_anchors(past: Tensor, steps: int, period: int) -> list[Tensor]:
    """Return what predictions may be relative to, [B, H, C] each, of past targets [T, B, C]: the
    last value, the mean, and with a season the last one and the mean of all."""
    anchors = [
        past[-1][:, None].expand(-1, steps, -1),
        past.mean(dim=0)[:, None].expand(-1, steps, -1),
    ]
    if period:
        rows = torch.arange(steps, device=past.device) % period
        seasons = past[len(past) % period :].unflatten(0, (-1, period))
        anchors += [chosen[rows].transpose(0, 1) for chosen in (seasons[-1], seasons.mean(dim=0))]
    return anchors


def split_static(
    static: Tensor | None, future: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return static columns [B, K] and rows known ahead [B, H, U] from the numbers beside the
    context; `future` is H and U, 0 where none is known."""
    rows, columns = future
    if static is None or not rows:
        return static, None
    own, ahead = static.split([static.shape[1] - rows * columns, rows * columns], dim=1)
    return own, ahead.reshape(-1, rows, columns)


class BoostedTrees(nn.Module):
    """Fitted trees as a network: `model.kind = "gbm"`."""

    columns: Tensor
    basis: Tensor
    mean: Tensor

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
        self.options, self.future = TreeOptions.read(model), future
        targets, trees, count = self.options.targets, self.options.trees, self.options.outputs
        classes, leaves = outputs // (steps * targets), self.options.leaves
        self.shape = (steps, targets, classes)
        self.register_buffer("columns", torch.zeros(min(inputs, MAX_FEATURES), dtype=torch.int64))
        self.register_buffer("basis", torch.zeros(count, steps * targets))
        self.register_buffer("mean", torch.zeros(steps * targets))
        self.trees = nn.Module()
        for name, shape, dtype in (
            ("feature", (trees, leaves - 1), torch.int32),
            ("threshold", (trees, leaves - 1), torch.float32),
            ("path", (trees, leaves - 1, leaves), torch.int8),
            ("lefts", (trees, leaves), torch.int8),
            ("value", (trees, leaves), torch.float32),
            ("output", (trees,), torch.int64),
            ("level", (count * classes,), torch.float32),
        ):
            self.trees.register_buffer(name, torch.zeros(shape, dtype=dtype))

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        options = self.options
        boosting = Boosting(
            layout=tuple((FEATURES.index(kind), rows) for kind, rows in options.features),
            columns=self.columns,
            anchor=options.anchor,
            period=options.period,
            future=self.future[1],
            basis=self.basis,
            mean=self.mean,
            trees=dict(self.trees.named_buffers()),
        )
        with torch.autocast(inputs.device.type, enabled=False):
            own, ahead = split_static(static, self.future)
            return boosting.predict(inputs, own, ahead, self.shape).flatten(1)
