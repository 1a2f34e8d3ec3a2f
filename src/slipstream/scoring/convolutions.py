"""Random convolutions with a ridge classifier in closed form: fitting the rocket baseline.

`models/convolutions.py` has the features and the predictions. Shapes: T context rows, B windows, F
inputs, N kernels, D = 2 N features, H predicted rows, Q classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.engine.step import EVAL_BATCH
from slipstream.models.convolutions import Convolutions
from slipstream.models.kinds.convolutions import MAX_CHANNELS, MAX_LENGTH
from slipstream.scoring.batch import ChunkLoader

LENGTHS = (7, 9, MAX_LENGTH)
MIN_CONTEXT = 9
"""Context rows below which windows are too short"""
MAX_KERNELS, MIN_KERNELS, MANY_WINDOWS_KERNELS = 2000, 100, 500
MAX_FEW_WINDOWS = 1500
"""Windows up to which there are `MAX_KERNELS`: the classifier is then solved from the products of
windows with each other"""
MAX_WINDOWS = 20_000
CPU_WORK, GPU_WORK = 1e10, 2e12
"""Multiplications of all windows with all kernels; where there would be more, there are fewer
kernels"""
PENALTIES = tuple(10.0 ** (exponent / 2) for exponent in range(-6, 13))
TEMPERATURES = tuple(2.0 ** (exponent / 4) for exponent in range(-8, 41))


def draw_kernels(context: int, num_inputs: int, count: int) -> Convolutions:
    """Return about `count` random kernels, always the same ones, without a classifier."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    shapes = []
    for length in LENGTHS:
        if length <= context:
            dilation = 1
            while (length - 1) * dilation < context:
                reach = (length - 1) * dilation // 2
                shapes += [(length, dilation, padding) for padding in (0, reach)]
                dilation *= 2
    num_channels = min(num_inputs, MAX_CHANNELS)
    kernels, groups, channels = [], [], []
    for number, (length, dilation, padding) in enumerate(shapes):
        size = count * (number + 1) // len(shapes) - count * number // len(shapes)
        if not size:
            continue
        weights = torch.randn(size, num_channels, length, generator=generator)
        weights = weights - weights.mean(dim=2, keepdim=True)
        # of several inputs, each kernel reads some: any number of them is as likely
        shares = draw(size, num_channels)
        limit = shares.sort(dim=1).values[torch.arange(size), (draw(size) * num_channels).long()]
        weights = weights * (shares <= limit[:, None])[..., None]
        padded = torch.zeros(size, num_channels, MAX_LENGTH)
        padded[..., :length] = weights
        kernels.append(padded)
        groups.append((size, length, dilation, padding))
        channels.append(torch.randperm(num_inputs, generator=generator)[:num_channels])
    joined = torch.cat(kernels)
    none = torch.zeros(0)
    return Convolutions(
        kernels=joined,
        groups=torch.tensor(groups),
        channels=torch.stack(channels),
        bias=draw(len(joined)) * 2 - 1,
        mean=none,
        size=none,
        weights=none,
    )


def fit_convolutions(
    dataset: Dataset, load_chunks: ChunkLoader, max_windows: int = 0
) -> tuple[Convolutions, int]:
    """Return fitted convolutions, and of how many training windows one was used; of folds, the
    largest has `max_windows`."""
    signature = dataset.signature
    num_classes, num_inputs = len(signature.classes), len(signature.inputs)
    num_windows = max(dataset.num_windows["train"], max_windows)
    device = next(iter(load_chunks("train"))).series.values.device
    work = GPU_WORK if device.type == "cuda" else CPU_WORK
    all_windows = num_windows + sum(dataset.num_windows.values()) - dataset.num_windows["train"]
    taps = signature.context * sum(LENGTHS) / len(LENGTHS) * min(num_inputs, MAX_CHANNELS)
    count = MAX_KERNELS if num_windows <= MAX_FEW_WINDOWS else MANY_WINDOWS_KERNELS
    count = max(min(count, int(work / (all_windows * taps))), MIN_KERNELS)
    stride = -(-num_windows // MAX_WINDOWS)
    drawn = draw_kernels(signature.context, num_inputs, count).to(device)

    def load(set_name: str) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in load_chunks(set_name):
            for starts in chunk.starts[::stride].split(EVAL_BATCH):
                batch = windows.gather(chunk.series, starts.to(device))
                yield drawn.compute(batch.inputs), batch.targets[..., 0].long()

    features, labels = (torch.cat(parts) for parts in zip(*load("train"), strict=True))
    val_features, val_labels = (torch.cat(parts) for parts in zip(*load("val"), strict=True))
    size, mean = torch.std_mean(features, dim=0, correction=0)
    size = torch.where(size > 1e-6, size, 1.0)
    x, val_x = (((values - mean) / size).double() for values in (features, val_features))
    truth = torch.nn.functional.one_hot(labels, num_classes).double().flatten(1) * 2 - 1
    weights, unseen = solve_classifier(x, truth)
    # how sure the scores are: by windows that the weights have not seen
    scores = torch.cat([unseen, val_x @ weights[:-1] + weights[-1]])
    known = torch.cat([labels, val_labels]).flatten()
    by_row = scores.unflatten(1, (labels.shape[1], -1)).flatten(0, 1)
    losses = [
        float(torch.nn.functional.cross_entropy(by_row * temperature, known))
        for temperature in TEMPERATURES
    ]
    weights = weights * TEMPERATURES[losses.index(min(losses))]
    state = drawn.to_state() | {"mean": mean, "size": size, "weights": weights}
    return Convolutions.from_state(state), stride


def solve_classifier(x: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return ridge weights [D + 1, outputs] with the penalty of the lowest leave-one-out error, and
    the leave-one-out predictions; `x` has columns of mean 0."""
    count, width = x.shape
    level = truth.mean(dim=0)
    if count <= width:
        sizes, vectors = torch.linalg.eigh(x @ x.T)
        kept = sizes > 1e-9 * sizes[-1]
        sizes, vectors = sizes[kept], vectors[:, kept]
        axes = x.T @ vectors / sizes.sqrt()
    else:
        sizes, axes = torch.linalg.eigh(x.T @ x)
        sizes = sizes.clamp(min=0.0)
    places = x @ axes
    products = places.T @ (truth - level)
    best: tuple[float, Tensor, Tensor] | None = None
    for penalty in PENALTIES:
        solved = products / (sizes + penalty)[:, None]
        fitted = level + places @ solved
        # each window's own weight in its prediction, the constant included
        own = (places.square() / (sizes + penalty)).sum(dim=1) + 1 / count
        unseen = truth - (truth - fitted) / (1 - own).clamp(min=1e-9)[:, None]
        error = float((truth - unseen).square().sum())
        if best is None or error < best[0]:
            best = error, solved, unseen
    assert best is not None
    _, solved, unseen = best
    return torch.cat([axes @ solved, level[None]]), unseen


def make_network(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return fitted convolutions as the options and weights of `model.kind = "rocket"`."""
    groups = [" ".join(map(str, group)) for group in state["groups"].tolist()]
    weights = {f"core.{name}": values for name, values in state.items() if name != "groups"}
    weights["core.weights"] = weights["core.weights"].float()
    return {"groups": groups}, weights
