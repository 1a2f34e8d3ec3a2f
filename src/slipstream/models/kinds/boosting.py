"""Gradient-boosted trees without torch: the gbm baseline as a member of an ensemble.

`models/boosting.py` has the PyTorch module, `scoring/boosting.py` fits it. A tree compares features
with thresholds, so that a feature which differs in its last digit may lead to another leaf. For
that reason all forms add in double precision, and round the features to float32.

Shapes: T context rows, B sequences, F inputs, H predicted rows, C targets, D features, K outputs,
U columns known ahead, M trees, S splits and L leaves of a tree, Q classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from slipstream.config import Model, Signature
from slipstream.models.c_code import LANES, CLayers, ConstArrays, NetworkShape, format_integers
from slipstream.models.kinds import Kind
from slipstream.models.numpy_layers import Array, Shape, Weights

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

FEATURES = ("last", "mean", "deviation", "least", "most", "row")
"""Kinds of features of an input: the newest value, the mean over so many rows, statistics of the
context, and the value of the row so many rows from the end"""
AHEAD_NUMBERS = 48
"""Numbers of the rows known ahead that are features; of more, neighbouring rows are averaged"""
MAX_FEATURES = 128
TREES_AT_ONCE = 16
"""Trees that are decided together: more need more memory, fewer more calls"""
MAX_NUMBERS = 1 << 18
"""Leaves of trees times windows that numpy decides at once: to fit a cache"""


NUMBERS = ("period", "outputs", "trees", "leaves", "targets")
"""The options that are numbers"""


class TreeOptions(NamedTuple):
    """The `model.options` of fitted trees."""

    features: tuple[tuple[str, int], ...]
    """Of each input: the kind of a feature, and its number of rows"""
    anchor: tuple[float, ...]
    """What predictions are relative to: shares of the last value, the context's mean, the last
    season and the mean season; empty where they are relative to nothing"""
    period: int
    """Rows of the season; 0 without one"""
    outputs: int
    """K"""
    trees: int
    leaves: int
    """L; the splits of a tree are one fewer"""
    targets: int
    """C"""

    @classmethod
    def read(cls, model: Model) -> TreeOptions:
        options = cast(dict[str, Any], model.options)
        pairs = (name.split() for name in options["features"])
        return cls(
            features=tuple((kind, int(rows)) for kind, rows in pairs),
            anchor=tuple(float(share) for share in options["anchor"]),
            **{name: int(options[name]) for name in NUMBERS},
        )

    def write(self) -> dict[str, Any]:
        """Return them as `model.options`."""
        features = [f"{kind} {rows}" for kind, rows in self.features]
        return {**self._asdict(), "features": features, "anchor": list(self.anchor)}

    @property
    def anchor_rows(self) -> int:
        """The different rows of the anchor: those of a season, or one; 0 without an anchor."""
        if not self.anchor:
            return 0
        return self.period if any(self.anchor[2:]) else 1


def count_pooled(future: tuple[int, int]) -> int:
    """Return how many of the rows known ahead are averaged into one."""
    rows, columns = future
    return max(-(-rows * columns // AHEAD_NUMBERS), 1)


def find_shares(basis: npt.NDArray[Any], steps: int) -> Array:
    """Return the share of each output in each predicted row, [K, H]."""
    by_row = basis.reshape(len(basis), steps, -1).astype(np.float64)
    return np.asarray(by_row.mean(axis=2), dtype=np.float32)


class BoostingKind(Kind):
    """Trees over features of the window and of what is known beside it."""

    c_template = "boosting"
    added_weights = frozenset(
        f"core.trees.{name}" for name in ("feature", "threshold", "path", "lefts", "value")
    )

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        options = TreeOptions.read(model)
        numbers = signature.steps_out * (1 if signature.classes else options.targets)
        classes = signature.outputs if signature.classes else 1
        columns = min(signature.model_inputs, MAX_FEATURES)
        shapes: dict[str, Shape] = {
            "columns": (columns,),
            "basis": (options.outputs, numbers),
            "mean": (numbers,),
            "trees.level": (options.outputs * classes,),
            "trees.output": (options.trees,),
        }
        trees, leaves = options.trees, options.leaves
        shapes |= {f"trees.{name}": (trees, leaves - 1) for name in ("feature", "threshold")}
        shapes |= {f"trees.{name}": (trees, leaves) for name in ("lefts", "value")}
        shapes["trees.path"] = (trees, leaves - 1, leaves)
        return {f"core.{name}": shape for name, shape in shapes.items()}

    def get_width(self, model: Model, signature: Signature) -> int:
        options, columns = TreeOptions.read(model), min(signature.model_inputs, MAX_FEATURES)
        rows, future = signature.future_shape
        width = len(options.features) * columns + len(signature.static)
        width += -(-rows // count_pooled((rows, future))) * future
        return width + (options.outputs * future if options.outputs < rows else 0)

    def count_constant_products(self, model: Model, signature: Signature, tokens: int) -> int:
        options = TreeOptions.read(model)
        return options.trees * options.leaves.bit_length()  # comparisons, roughly

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        """Return the features of the window, then the different rows of the anchor."""
        options = TreeOptions.read(model)
        rows = inputs[:, :, weights["core.columns"].astype(np.intp)]
        changes = rows - rows[-1] if options.anchor else rows
        exact = changes.astype(np.float64)
        parts: list[Any] = []
        for kind, length in options.features:
            match kind:
                case "last":
                    parts.append(rows[-1])
                case "row":
                    parts.append(changes[-length])
                case "mean":
                    parts.append(exact[-length:].mean(axis=0))
                case "deviation":
                    parts.append(rows.astype(np.float64).std(axis=0))
                case "least":
                    parts.append(changes.min(axis=0))
                case "most":
                    parts.append(changes.max(axis=0))
        if options.anchor:
            anchor = _compute_anchor(inputs[..., inputs.shape[2] - options.targets :], options)
            parts.append(anchor.swapaxes(0, 1).reshape(inputs.shape[1], -1))
        return np.concatenate([part.astype(np.float32) for part in parts], axis=1)

    def apply_head(
        self,
        weights: Weights,
        model: Model,
        signature: Signature,
        features: Array,
        static: Array | None,
    ) -> Array:
        options, steps = TreeOptions.read(model), signature.steps_out
        anchor_width = options.anchor_rows * options.targets
        anchor = features[:, features.shape[1] - anchor_width :]
        parts = [features[:, : features.shape[1] - anchor_width]]
        basis = weights["core.basis"]
        if static is not None:
            fixed = len(signature.static)
            parts.append(static[:, :fixed])
            count, columns = signature.future_shape
            if count:
                ahead = static[:, fixed:].reshape(-1, count, columns).astype(np.float64)
                size = count_pooled((count, columns))
                parts += [
                    ahead[:, begin : begin + size].mean(axis=1) for begin in range(0, count, size)
                ]
                if options.outputs < count:
                    shares = find_shares(basis, steps).astype(np.float64)
                    parts.append(np.einsum("bhu,kh->bku", ahead, shares).reshape(len(ahead), -1))
        joined = np.concatenate([part.astype(np.float32) for part in parts], axis=1)
        outputs = sum_trees(weights, joined)
        if signature.classes:
            by_row = outputs.reshape(len(outputs), options.outputs, -1)
            logits = np.einsum("bkq,kh->bhq", by_row, basis.astype(np.float64))
            return np.asarray(logits.reshape(len(outputs), -1), dtype=np.float32)
        flat = (weights["core.mean"] + outputs @ basis.astype(np.float64)).astype(np.float32)
        if not options.anchor:
            return flat
        places = np.arange(steps) % options.anchor_rows
        rows = anchor.reshape(len(flat), options.anchor_rows, -1)[:, places]
        return np.asarray(flat + rows.reshape(len(flat), -1))

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, options = network.graph, TreeOptions.read(network.model)
        context, inputs = network.signature.context, network.signature.model_inputs
        places = network.weights["core.columns"].astype(np.int64)
        read = rows
        if len(places) < inputs:
            read = graph.add("Gather", rows, graph.constant(places), axis=2)
        newest = graph.take(read, -1, axis=0)
        changes = graph.add("Sub", read, newest) if options.anchor else read
        exact = graph.cast(changes, np.float64)

        def average(value: str) -> str:
            return graph.add("ReduceMean", value, axes=[0], keepdims=0)

        parts = []
        for kind, length in options.features:
            match kind:
                case "last":
                    parts.append(newest)
                case "row":
                    parts.append(graph.take(changes, context - length, axis=0))
                case "mean":
                    last = graph.slice(exact, context - length, context, axis=0)
                    parts.append(graph.cast(average(last), np.float32))
                case "deviation":
                    double = graph.cast(read, np.float64)
                    away = graph.add("Sub", double, average(double))
                    variance = average(graph.add("Mul", away, away))
                    parts.append(graph.cast(graph.add("Sqrt", variance), np.float32))
                case "least":
                    parts.append(graph.add("ReduceMin", changes, axes=[0], keepdims=0))
                case "most":
                    parts.append(graph.add("ReduceMax", changes, axes=[0], keepdims=0))
        if options.anchor:
            past = graph.slice(rows, inputs - options.targets, inputs, axis=2)
            anchor = _add_anchor(network, past, options)
            parts.append(graph.reshape(graph.transpose(anchor, 1, 0, 2), 0, -1))
        return graph.concatenate(*parts, axis=1)

    def add_head_to_graph(self, network: OnnxNetwork, features: str, static: str | None) -> str:
        graph, signature = network.graph, network.signature
        options, steps = TreeOptions.read(network.model), signature.steps_out
        basis = network.weights["core.basis"]
        window = len(options.features) * len(network.weights["core.columns"])
        parts = [graph.slice(features, 0, window, axis=1) if options.anchor else features]
        if static is not None:
            fixed, reads_ahead = len(signature.static), signature.future_shape[0] > 0
            if fixed:
                parts.append(graph.slice(static, 0, fixed, axis=1) if reads_ahead else static)
            if reads_ahead:
                parts += self._add_ahead(network, static)
        outputs = _add_trees(network, graph.concatenate(*parts, axis=1))
        shares = graph.constant(basis.astype(np.float64))
        if signature.classes:
            by_row = graph.reshape(outputs, 0, options.outputs, -1)
            by_class = graph.add("MatMul", graph.transpose(by_row, 0, 2, 1), shares)  # [B, Q, H]
            logits = graph.reshape(graph.transpose(by_class, 0, 2, 1), 0, -1)
            return graph.cast(logits, np.float32)
        mean = graph.constant(network.weights["core.mean"].astype(np.float64))
        flat = graph.cast(graph.add("Add", graph.add("MatMul", outputs, shares), mean), np.float32)
        if not options.anchor:
            return flat
        end = window + options.anchor_rows * options.targets
        anchor = graph.reshape(
            graph.slice(features, window, end, axis=1), 0, options.anchor_rows, options.targets
        )
        places = graph.constant(np.arange(steps, dtype=np.int64) % options.anchor_rows)
        by_step = graph.add("Gather", anchor, places, axis=1)
        return graph.add("Add", flat, graph.reshape(by_step, 0, -1))

    def _add_ahead(self, network: OnnxNetwork, static: str) -> Iterator[str]:
        """Yield the features of the rows known ahead."""
        graph, signature = network.graph, network.signature
        fixed, (count, columns) = len(signature.static), signature.future_shape
        rows = graph.slice(static, fixed, fixed + count * columns, axis=1) if fixed else static
        ahead = graph.cast(graph.reshape(rows, 0, count, columns), np.float64)
        size = count_pooled((count, columns))
        for begin in range(0, count, size):
            part = graph.slice(ahead, begin, min(begin + size, count), axis=1)
            mean = graph.add("ReduceMean", part, axes=[1], keepdims=0)
            yield graph.cast(mean, np.float32)
        basis = network.weights["core.basis"]
        if len(basis) < count:
            shares = graph.constant(find_shares(basis, count).astype(np.float64))
            by_output = graph.add("MatMul", shares, ahead)  # [B, K, U]
            yield graph.cast(graph.reshape(by_output, 0, -1), np.float32)

    def describe_c(self, shape: NetworkShape) -> CLayers:
        options, signature = TreeOptions.read(shape.model), shape.signature
        classes = signature.outputs if signature.classes else 1
        kinds = [FEATURES.index(kind) for kind, _ in options.features]
        rows, columns = signature.future_shape
        return CLayers(
            defines={
                "COLUMNS_READ": min(signature.model_inputs, MAX_FEATURES),
                "LAYOUT": len(kinds),
                "TREES": options.trees,
                "SPLITS": options.leaves - 1,
                "LEAVES": options.leaves,
                "TREE_OUTPUTS": options.outputs,
                "SUMS": options.outputs * classes,
                "POOLED": count_pooled((rows, columns)),
            },
            work={"features": shape.width, "sums": max(options.outputs * classes, LANES)},
            values={
                "layout_kinds": format_integers(kinds),
                "layout_rows": format_integers([length for _, length in options.features]),
                "feature_kinds": {name: number for number, name in enumerate(FEATURES)},
                "has_statistics": any(kind in STATISTICS for kind, _ in options.features),
                "anchor": options.anchor,
                "anchor_rows": options.anchor_rows,
                "trees": options.trees,
                "has_shares": options.outputs < rows,
            },
            num_bytes=8 * len(kinds),
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        signature, options = shape.signature, TreeOptions.read(shape.model)

        def add(name: str, values: Any, kind: str) -> str:
            if kind == "float":
                return arrays.add_floats(f"{prefix}_{name}", values)
            return arrays.add_integers(f"{prefix}_{name}", values, kind)

        basis = read("basis")
        members = [add("columns", read("columns"), "uint16_t")]
        if options.trees:
            children = [
                find_children(path, lefts)
                for path, lefts in zip(read("trees.path"), read("trees.lefts"), strict=True)
            ]
            left, right = (np.concatenate(sides) for sides in zip(*children, strict=True))
            members += [
                add("feature", read("trees.feature"), "uint16_t"),
                add("threshold", read("trees.threshold"), "float"),
                add("left", left, "int8_t"),
                add("right", right, "int8_t"),
                add("value", read("trees.value"), "float"),
                add("output", read("trees.output"), "uint16_t"),
            ]
        members.append(add("level", read("trees.level"), "float"))
        if options.outputs < signature.future_shape[0]:
            members.append(add("shares", find_shares(basis, signature.steps_out), "float"))
        matrix, bias = basis.T, read("mean")
        if signature.classes:
            matrix = np.kron(matrix, np.eye(signature.outputs, dtype=np.float32))
            bias = np.zeros(len(matrix), dtype=np.float32)
        return [*members, arrays.add_dense(f"{prefix}_head", np.ascontiguousarray(matrix), bias)]


STATISTICS = ("deviation", "least", "most")


def sum_trees(weights: Weights, features: Array) -> npt.NDArray[np.float64]:
    """Return the sums of the trees, [B, D] to [B, K]; of classes [B, K * Q]."""
    trees = {
        name.removeprefix("core.trees."): values
        for name, values in weights.items()
        if name.startswith("core.trees.")
    }
    outputs = np.repeat(trees["level"][None].astype(np.float64), len(features), axis=0)
    by_feature = np.ascontiguousarray(features.T)
    places, owners = trees["feature"].astype(np.intp), trees["output"].astype(np.intp)
    is_owner = (owners[:, None] == np.arange(outputs.shape[1])).astype(np.float64)
    size = max(MAX_NUMBERS // max(trees["value"].shape[1] * len(features), 1), 1)
    for first in range(0, len(owners), size):
        block = slice(first, first + size)
        # a leaf is reached where all splits on its path go to its side
        is_left = by_feature[places[block]] <= trees["threshold"][block, :, None]
        agreed = trees["path"][block].swapaxes(1, 2) @ is_left.astype(np.float32)
        is_leaf = agreed == trees["lefts"][block, :, None]
        reached = trees["value"][block, None] @ is_leaf.astype(np.float32)
        outputs += reached[:, 0].T @ is_owner[block]
    return outputs


def find_children(path: npt.NDArray[Any], lefts: npt.NDArray[Any]) -> list[npt.NDArray[np.int8]]:
    """Return where each split of a tree leads on its left and on its right: to a split, or to a
    leaf, as -1 for leaf 0, -2 for leaf 1 and so on. Splits come before those below them."""
    children = [np.full(len(path), -1, dtype=np.int8) for _ in range(2)]
    used = [leaf for leaf in range(len(lefts)) if lefts[leaf] >= 0]
    for split in range(len(path)):
        for child, side in zip(children, (1, -1), strict=True):
            below = [leaf for leaf in used if path[split, leaf] == side]
            if len(below) == 1:
                child[split] = -1 - below[0]
            elif below:  # the first later split that has exactly these leaves
                child[split] = next(
                    later
                    for later in range(split + 1, len(path))
                    if [leaf for leaf in used if path[later, leaf]] == below
                )
    return children


def _compute_anchor(past: Array, options: TreeOptions) -> Array:
    """Return the different rows of what predictions are relative to, of past targets [T, B, C]."""
    choices = [past[-1:], past.mean(axis=0, keepdims=True)]
    if options.anchor_rows > 1:
        seasons = past[len(past) % options.period :].reshape(-1, options.period, *past.shape[1:])
        choices += [seasons[-1], seasons.mean(axis=0)]
    pairs = zip(options.anchor, choices, strict=False)
    parts = [np.float32(share) * choice for share, choice in pairs if share]
    total = sum(parts[1:], parts[0])
    return np.broadcast_to(total, (options.anchor_rows, *total.shape[1:]))


def _add_anchor(network: OnnxNetwork, past: str, options: TreeOptions) -> str:
    """Add the different rows of the anchor [rows, B, C], as `_compute_anchor`."""
    graph, context = network.graph, network.signature.context
    parts = []
    for number, share in enumerate(options.anchor):
        if not share:
            continue
        match number:
            case 0:
                choice = graph.slice(past, context - 1, context, axis=0)
            case 1:
                choice = graph.add("ReduceMean", past, axes=[0], keepdims=1)
            case 2:
                choice = graph.slice(past, context - options.period, context, axis=0)
            case _:
                whole = graph.slice(past, context % options.period, context, axis=0)
                count = context // options.period
                seasons = graph.reshape(whole, count, options.period, -1, options.targets)
                choice = graph.add("ReduceMean", seasons, axes=[0], keepdims=0)
        parts.append(graph.add("Mul", choice, graph.constant(np.float32(share))))
    return parts[0] if len(parts) == 1 else graph.add("Sum", *parts)


def _add_trees(network: OnnxNetwork, features: str) -> str:
    """Add the sums of the trees, as `sum_trees`."""
    graph, weights = network.graph, network.weights
    trees = {
        name.removeprefix("core.trees."): values
        for name, values in weights.items()
        if name.startswith("core.trees.")
    }
    level = graph.constant(trees["level"].astype(np.float64))
    owners = trees["output"].astype(np.int64)
    is_owner = (owners[:, None] == np.arange(len(trees["level"]))).astype(np.float64)
    by_feature = graph.transpose(features, 1, 0)
    sums: list[str] = []
    for first in range(0, len(owners), TREES_AT_ONCE):
        block = slice(first, first + TREES_AT_ONCE)
        places = graph.constant(trees["feature"][block].astype(np.int64))
        values = graph.add("Gather", by_feature, places, axis=0)  # [M, S, B]
        threshold = graph.constant(trees["threshold"][block, :, None])
        is_left = graph.cast(graph.add("LessOrEqual", values, threshold), np.float32)
        path = graph.constant(trees["path"][block].swapaxes(1, 2))
        agreed = graph.add("MatMul", path, is_left)
        lefts = graph.constant(trees["lefts"][block, :, None])
        is_leaf = graph.cast(graph.add("Equal", agreed, lefts), np.float32)
        reached = graph.add("MatMul", graph.constant(trees["value"][block, None]), is_leaf)
        by_window = graph.cast(graph.transpose(graph.squeeze(reached, 1), 1, 0), np.float64)
        sums.append(graph.add("MatMul", by_window, graph.constant(is_owner[block])))
    if not sums:  # the constants, once for each sequence
        first_feature = graph.slice(features, 0, 1, axis=1)
        zero = graph.add("Mul", first_feature, graph.constant(np.float32(0)))
        return graph.add("Add", graph.cast(zero, np.float64), level)
    return graph.add("Sum", *sums, level)
