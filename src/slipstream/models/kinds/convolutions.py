"""Random convolutions without torch: the rocket baseline as a member of an ensemble.

`models/convolutions.py` has the PyTorch module, `scoring/convolutions.py` fits it. Responses are in
double precision, so that all forms find the same sign. Shapes: T context rows, B windows, F inputs,
N kernels, L taps, P places of a kernel, H predicted rows, Q classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from slipstream.config import Model, Signature
from slipstream.models.c_code import CLayers, ConstArrays, NetworkShape, format_integers
from slipstream.models.kinds import Kind
from slipstream.models.numpy_layers import Array, Shape, Weights

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

MAX_LENGTH = 11
"""Taps of the longest kernels"""
MAX_CHANNELS = 6
"""Inputs that a kernel reads at most"""
MAX_RESPONSES = 1 << 22
"""Responses that are held at once"""


class KernelGroup(NamedTuple):
    """Kernels of one shape, which are next to each other."""

    kernels: int
    length: int
    dilation: int
    padding: int

    def list_places(self, context: int) -> Any:
        """Return the rows of the padded window that a kernel reads at each place, [P, L]."""
        reach = (self.length - 1) * self.dilation
        first = np.arange(context + 2 * self.padding - reach, dtype=np.int64)
        return first[:, None] + np.arange(self.length, dtype=np.int64) * self.dilation


def read_groups(model: Model) -> list[KernelGroup]:
    """Return the groups of kernels from `model.options`."""
    groups = cast(tuple[str, ...], model.options["groups"])
    return [KernelGroup(*map(int, group.split())) for group in groups]


class RandomConvolutionsKind(Kind):
    """The largest response and the share of positive ones of each kernel, and a linear
    classifier."""

    c_template = "convolutions"
    added_weights = frozenset({"core.channels"})

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        groups = read_groups(model)
        count = sum(group.kernels for group in groups)
        channels, outputs = min(signature.model_inputs, MAX_CHANNELS), self._count(signature)
        return {
            "core.kernels": (count, channels, MAX_LENGTH),
            "core.channels": (len(groups), channels),
            "core.bias": (count,),
            "core.mean": (2 * count,),
            "core.size": (2 * count,),
            "core.weights": (2 * count + 1, outputs),
        }

    def get_width(self, model: Model, signature: Signature) -> int:
        return 2 * sum(group.kernels for group in read_groups(model))

    def count_constant_products(self, model: Model, signature: Signature, tokens: int) -> int:
        channels = min(signature.model_inputs, MAX_CHANNELS)
        products = sum(
            group.kernels * len(group.list_places(signature.context)) * group.length
            for group in read_groups(model)
        )
        return products * channels

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        groups = read_groups(model)
        widest = max(group.kernels for group in groups)
        size = max(MAX_RESPONSES // (len(inputs) * max(widest, MAX_CHANNELS * MAX_LENGTH)), 1)
        series = inputs.transpose(1, 2, 0).astype(np.float64)
        parts = [
            _compute_features(weights, groups, series[begin : begin + size])
            for begin in range(0, len(series), size)
        ]
        return np.concatenate(parts)

    def apply_head(
        self,
        weights: Weights,
        model: Model,
        signature: Signature,
        features: Array,
        static: Array | None,
    ) -> Array:
        return classify(weights, features)

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, weights = network.graph, network.weights
        series = graph.cast(graph.transpose(rows, 1, 2, 0), np.float64)
        largest, positive, first = [], [], 0
        zero = graph.constant(np.float64(0))
        for group, channels in zip(
            read_groups(network.model), weights["core.channels"], strict=True
        ):
            read = graph.add("Gather", series, graph.constant(channels.astype(np.int64)), axis=1)
            if group.padding:
                pads = graph.integers(0, 0, group.padding, 0, 0, group.padding)
                read = graph.add("Pad", read, pads, zero)
            places = graph.constant(group.list_places(network.signature.context))
            patches = graph.transpose(graph.add("Gather", read, places, axis=2), 0, 2, 1, 3)
            chosen = slice(first, first + group.kernels)
            first += group.kernels
            kernels = weights["core.kernels"][chosen, :, : group.length].astype(np.float64)
            flat = graph.reshape(patches, 0, 0, len(channels) * group.length)
            bias = weights["core.bias"][chosen].astype(np.float64)
            responses = graph.linear(flat, kernels.reshape(group.kernels, -1), bias)
            largest.append(graph.add("ReduceMax", responses, axes=[1], keepdims=0))
            is_positive = graph.cast(graph.add("Greater", responses, zero), np.float64)
            positive.append(graph.add("ReduceMean", is_positive, axes=[1], keepdims=0))
        return graph.concatenate(*largest, *positive, axis=1)

    def add_head_to_graph(self, network: OnnxNetwork, features: str, static: str | None) -> str:
        return add_classifier(network, features)

    def describe_c(self, shape: NetworkShape) -> CLayers:
        groups, signature = read_groups(shape.model), shape.signature
        return CLayers(
            defines={
                "GROUPS": len(groups),
                "KERNELS": sum(group.kernels for group in groups),
                "CHANNELS_READ": min(signature.model_inputs, MAX_CHANNELS),
            },
            work={"series": signature.context * signature.model_inputs},
            values={"groups": [format_integers(group) for group in groups]},
            num_bytes=16 * len(groups),
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        kernels, parts, first = read("kernels"), [], 0
        for group in read_groups(shape.model):
            parts.append(kernels[first : first + group.kernels, :, : group.length].ravel())
            first += group.kernels
        return [
            arrays.add_floats(f"{prefix}_kernels", np.concatenate(parts)),
            arrays.add_integers(f"{prefix}_channels", read("channels"), "uint16_t"),
            *(arrays.add_floats(f"{prefix}_{name}", read(name)) for name in ("bias", "mean")),
            arrays.add_floats(f"{prefix}_size", read("size")),
            add_c_classifier(arrays, read("weights"), prefix),
        ]

    def _count(self, signature: Signature) -> int:
        return signature.steps_out * signature.model_targets * signature.outputs


def _compute_features(weights: Weights, groups: list[KernelGroup], series: Any) -> Array:
    """Return the features of a few windows [B, F, T] in double precision."""
    largest, positive, first = [], [], 0
    for group, channels in zip(groups, weights["core.channels"].astype(np.intp), strict=True):
        width = (group.padding, group.padding)
        padded = np.pad(series[:, channels], ((0, 0), (0, 0), width))
        patches = padded[:, :, group.list_places(series.shape[2])].transpose(0, 2, 1, 3)
        chosen = slice(first, first + group.kernels)
        first += group.kernels
        kernels = weights["core.kernels"][chosen, :, : group.length].astype(np.float64)
        flat = patches.reshape(*patches.shape[:2], -1)
        responses = flat @ kernels.reshape(group.kernels, -1).T + weights["core.bias"][chosen]
        largest.append(responses.max(axis=1))
        positive.append((responses > 0).mean(axis=1))
    return np.concatenate([*largest, *positive], axis=1).astype(np.float32)


def classify(weights: Weights, features: Any) -> Array:
    """Return the logits of a linear classifier on standardised features, [B, D] to [B, H * Q]."""
    scaled = (features.astype(np.float64) - weights["core.mean"]) / weights["core.size"]
    matrix = weights["core.weights"].astype(np.float64)
    return np.asarray(scaled @ matrix[:-1] + matrix[-1], dtype=np.float32)


def add_classifier(network: OnnxNetwork, features: str) -> str:
    """Add the linear classifier to a graph, as `classify`; features are double."""
    graph, weights = network.graph, network.weights
    mean, size, matrix = (
        weights[f"core.{name}"].astype(np.float64) for name in ("mean", "size", "weights")
    )
    centred = graph.add("Sub", features, graph.constant(mean))
    scaled = graph.add("Div", centred, graph.constant(size))
    return graph.cast(graph.linear(scaled, matrix[:-1].T, matrix[-1]), np.float32)


def add_c_classifier(arrays: ConstArrays, weights: Array, prefix: str) -> str:
    """Add the matrix of the classifier to the source, and return its initializer."""
    matrix = np.ascontiguousarray(weights[:-1].T)
    return arrays.add_dense(f"{prefix}_head", matrix, weights[-1])
