"""Runs the Triton kernels on the CPU, by Triton's interpreter; prints the errors as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted

A process of its own: the interpreter is chosen when the kernels are imported.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from triton.runtime import interpreter

from slipstream.engine import pack
from slipstream.engine.optim import BACKOFF, GROW_AFTER, GROWTH
from slipstream.kernels import adam, boosted_trees, gather, lane_step, precompile
from slipstream.kernels.rnn import fused, stepwise, wide_kernels
from slipstream.kernels.rnn import wide as split
from slipstream.kernels.rnn.fused import FusedOptions, FusedTile
from slipstream.kernels.rnn.weights import LayerWeights, StepwiseOptions
from slipstream.models.boosting import Boosting
from tests.kernels.layers import (
    Attention,
    Shape,
    apart,
    attention_error,
    attention_is_the_same_alone,
    attention_shapes,
    defined,
    drawn,
    draws_agree,
    norm_error,
    with_gaps,
)
from tests.kernels.trees import draw_features, draw_trees

Errors = Iterator[tuple[str, float]]
"""The relative error of each check, by its name"""
SHAPES = [
    Shape("lstm", K=2, T=5, B=3, D=4, H=6),
    Shape("lstm", K=2, T=4, B=20, D=3, H=16, W=2, states=True),
    Shape("lstm", K=1, T=4, B=3, D=70, H=7, W=2, last=True, states=True),
    Shape("lstm", K=1, T=1, B=1, D=1, H=1, last=True),
    Shape("lstm", K=2, T=5, B=3, D=64, H=16),
    Shape("gru", K=2, T=5, B=3, D=4, H=6),
    Shape("gru", K=2, T=4, B=20, D=3, H=16, W=2, states=True),
    Shape("gru", K=1, T=4, B=3, D=70, H=7, W=2, last=True, states=True),
]


def stepwise_shapes(count: int) -> Iterator[Shape]:
    """What lies at an end, more units than one program takes, and some drawn at random."""
    for kind in ("lstm", "gru"):
        yield Shape(kind, K=1, T=1, B=1, D=1, H=1)
        yield Shape(kind, K=1, T=3, B=1, D=17, H=129, W=2, last=True)
        yield Shape(kind, K=1, T=2, B=70, D=8, H=9, W=2)
        yield Shape(kind, K=2, T=4, B=2, D=8, H=16)  # nothing to pad
        draw = random.Random(kind)
        for _ in range(count):
            sizes = [draw.randint(1, most) for most in (5, 3, 20, 20, 20)]
            yield Shape(kind, *sizes, W=draw.choice([1, 2]), last=draw.random() < 0.3)


def mended() -> None:
    """NumPy no longer makes an int of an array with one element; the interpreter wants that."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def guarded() -> None:
    """No kernel may read or write outside of the tensors that it was given."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )
    spans: list[tuple[int, int]] = []

    def remembering(self, args, kwargs):
        found = prepare(self, args, kwargs)
        spans.clear()
        for tensor in (one for one in found[0] if hasattr(one, "data_ptr") and one.numel()):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            first = tensor.data_ptr()
            spans.append((first, first + (last + 1) * tensor.element_size()))
        return found

    def check(pointers, mask, size):
        asked = pointers.data[mask.data.astype(bool)].astype(np.int64)
        inside = np.zeros(asked.shape, dtype=bool)
        for first, end in spans:
            inside |= (asked >= first) & (asked + size <= end)
        if not inside.all():
            raise IndexError("a kernel reaches beyond its tensors")

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *rest)

    executor._init_args_hst = remembering
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def error_of(shape: Shape, dtype: torch.dtype, *, resident: int) -> float:
    given = drawn(shape, dtype)
    tile = FusedTile(16, 4, 1, resident)
    way = FusedOptions(
        shape.kind, shape.last, dtype, "ieee", shape.D <= 64, tile, tile, fast_tanh=False
    )
    states = [*given[5:], None, None][:2]
    out = fused.run_layer(way, given[0], LayerWeights(*given[1:5]), *states)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [out, *torch.autograd.grad(out, given, grad)]
    return apart(found, defined(shape, given, grad))


class NotWaiting:
    """A kernel whose programs wait for each other, which never ends where one runs after another.
    So none waits, and all run as often as there are steps: after each time, one more of them is
    right. `read` is what they may overwrite, and have to find as it was."""

    def __init__(self, kernel, read: str) -> None:
        self.kernel, self.read = kernel, read

    def __getitem__(self, grid):
        def launch(*given, launch_cooperative_grid: bool, **how) -> None:
            assert launch_cooperative_grid
            by_name = dict(zip(self.kernel.arg_names, given, strict=False))
            by_name[self.read] = by_name[self.read].clone()
            assert not by_name["counters"].any()
            by_name["counters"].fill_(1 << 30)
            for _ in range(by_name["T"]):
                self.kernel[grid](*by_name.values(), **how)
                added = by_name["counters"] - (1 << 30)
            assert (added == grid[0] * by_name["T"] ** 2).all()  # each counted itself in each time

        return launch


def split_shapes(count: int) -> Iterator[Shape]:
    """One part and several; with a count also full and wider ones, and some drawn at random."""
    for kind in ("lstm", "gru"):
        yield Shape(kind, K=1, T=1, B=1, D=1, H=1)
        yield Shape(kind, K=2, T=3, B=17, D=3, H=40, W=2)
        if count == 0:
            continue
        yield Shape(kind, K=1, T=4, B=5, D=3, H=64, last=True)
        yield Shape(kind, K=1, T=3, B=2, D=3, H=129, W=2, last=True)
        draw = random.Random(kind)
        for _ in range(count):
            sizes = [draw.randint(1, most) for most in (3, 4, 40, 9, 140)]
            yield Shape(kind, *sizes, W=draw.choice([1, 2]), last=draw.random() < 0.3)


def stepwise_error_of(
    shape: Shape, dtype: torch.dtype, *, loose: bool, tile: split.WideTile | None = None
) -> float:
    """Where `loose`, there are gaps between lanes of weights, and between rows of the gradient."""
    given = drawn(shape, dtype)
    way = StepwiseOptions(shape.kind, shape.last, dtype, use_triton=True, tile=tile)
    weights = [with_gaps(tensor, 1) if loose else tensor for tensor in given[1:]]
    out = stepwise.run_layer(way, given[0], LayerWeights(*weights))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    arriving = with_gaps(grad, -1) if loose else grad
    found = [out, *torch.autograd.grad(out, given, arriving)]
    return apart(found, defined(shape, given, grad))


def adam_error(*, decoupled: bool, columns: slice = slice(None), width: int = 50) -> float:
    """Against torch's own, three lanes of which one stays in its second step. `columns` are of a
    wider buffer, whose others must stay."""
    torch.manual_seed(0)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    wide = [torch.randn(3, width), torch.zeros(3, width), torch.zeros(3, width)]
    before = [buffer.clone() for buffer in wide]
    weights, first, second = (buffer[:, columns] for buffer in wide)
    count = torch.zeros(3)
    lr, decay, divisor = torch.tensor([1e-3, 1e-2, 3e-3]), torch.tensor([0.0, 0.1, 0.01]), 2.0
    alone = [torch.nn.Parameter(row.clone()) for row in weights]
    theirs = [
        cls([p], lr=float(rate), weight_decay=float(d))
        for p, rate, d in zip(alone, lr, decay, strict=True)
    ]
    for step in range(4):
        grads = torch.randn(3, 60)[:, : weights.shape[1]]
        moves = torch.tensor([True, step != 1, True])
        count += moves
        adam.adam_step(
            weights,
            grads * divisor,
            first,
            second,
            lr=lr,
            decay=decay,
            count=count,
            divisor=torch.full((3,), divisor),
            moves=moves,
            decoupled=decoupled,
        )
        for lane, optimizer in enumerate(theirs):
            if moves[lane]:
                alone[lane].grad = grads[lane].clone()
                optimizer.step()
    for buffer, old in zip(wide, before, strict=True):
        old[:, columns] = buffer[:, columns]
        if not torch.equal(buffer, old):
            return float("inf")
    wanted = torch.stack([p.detach() for p in alone])
    return float((weights - wanted).abs().max() / wanted.abs().max())


def rehearsed() -> bool:
    """Whether a rehearsal goes through a step and runs no kernel."""
    weights, grads, first = torch.zeros(3, 2, 8).unbind()
    ones = torch.ones(2)
    how = dict.fromkeys(("lr", "decay", "count", "divisor"), ones) | {"moves": ones > 0}
    for step in (precompile(), nullcontext()):
        unchanged = bool((first == 0).all())
        grads.fill_(1.0)
        with step:
            adam.adam_step(weights, grads, first, torch.zeros(2, 8), **how, decoupled=True)
    return unchanged and bool((first > 0).all())


def settle_error(
    *, scaled: bool, encoder: bool, clip: float = math.inf, width: int = 5000
) -> float:
    """Against the same in PyTorch: lanes that move, that overflow, whose scale grows, that are
    frozen and that are not active."""
    torch.manual_seed(0)
    K, S = 6, 7
    grads = torch.randn(K, width)
    grads[1, 3], grads[2, -1] = torch.inf, torch.nan
    active = torch.tensor([True, True, False, True, True, False])
    frozen = torch.tensor([True, True, False, False, False, False])
    state = {
        "count": torch.arange(K).float(),
        "cursor": torch.tensor([0, 1, 2, 6, 4, 5]),
        "losses": torch.zeros(K, S),
        "encoder_count": torch.arange(K).float() if encoder else None,
        "scale": 2.0 ** torch.arange(K) if scaled else None,
        "since_growth": torch.tensor([3, 4, 5, GROW_AFTER - 1, 0, 9]).int() if scaled else None,
    }
    mine = {name: None if t is None else t.clone() for name, t in state.items()}
    fixed = {"clip": torch.full((K,), clip), "rates": torch.rand(K, S)}
    fixed |= {"active": active, "frozen": frozen}
    loss = torch.randn(K)
    growth = GROWTH, BACKOFF, GROW_AFTER
    found = lane_step.settle(grads, loss, **fixed, **mine, growth=growth)

    divisor, overflow = pack.compute_divisor(grads, fixed["clip"], state["scale"])
    moves = active if overflow is None else active & ~overflow
    thawed = moves & ~frozen if encoder else moves
    lr = fixed["rates"].gather(1, state["cursor"][:, None])[:, 0]
    state["losses"].scatter_(1, state["cursor"][:, None], loss[:, None])
    for name, change in (("count", moves), ("encoder_count", thawed), ("cursor", moves)):
        if state[name] is not None:
            state[name] += change
    if overflow is not None:
        pack.update_loss_scale(state["scale"], state["since_growth"], overflow, active)
    same = [torch.equal(a, b) for a, b in zip(found[2:], (moves, thawed), strict=True)]
    same += [torch.equal(mine[name], t) for name, t in state.items() if t is not None]
    same += [
        torch.equal(found[0], lr),
        torch.equal(found[1][~moves].isnan(), divisor[~moves].isnan()),
    ]
    error = float((found[1] / divisor - 1).abs()[moves & divisor.isfinite()].max())
    return error if all(same) else float("inf")


def gather_is_exact(
    lanes: tuple[int, ...], T: int, B: int, columns: tuple[int, int, int], H: int
) -> bool:
    """Whether windows are those of plain indexing; columns: of the table, inputs and targets."""
    torch.manual_seed(0)
    width, F, C = columns
    table = torch.randn(97, width)
    inputs, targets = table[:, :F], table[:, width - C :]
    context_rows, target_rows = torch.arange(T)[:, None], T + 2 + torch.arange(H)
    starts = torch.randint(0, 97 - T - 2 - H, (2, *lanes, B))[1]
    found = gather.gather_windows(inputs, targets, starts, context_rows, target_rows)
    wanted = inputs[starts[..., None, :] + context_rows], targets[starts[..., None] + target_rows]
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def trees_are_exact(num_trees: int, num_sums: int, windows: int) -> bool:
    """Whether the sums are those of a window after the other."""
    generator = np.random.default_rng(num_trees)
    trees = draw_trees(generator, num_trees, num_sums, 5)
    features = draw_features(generator, windows, trees)
    found = boosted_trees.add_leaves(features, trees, trees["level"])
    eye = torch.eye(num_sums)
    network = Boosting((), torch.arange(0), (0.0,) * 4, 0, 0, eye, eye[0] * 0, trees)
    return torch.equal(found, network.predict_outputs(features))


def check_updates(_: int) -> Errors:
    yield "trees of a sum", float(not trees_are_exact(9, 1, 300))
    yield "trees of three sums", float(not trees_are_exact(20, 3, 257))
    yield "no trees", float(not trees_are_exact(0, 2, 5))
    yield "windows", float(not gather_is_exact((), 5, 7, (3, 2, 1), 1))
    yield "windows of lanes", float(not gather_is_exact((3,), 4, 300, (5, 4, 2), 3))
    yield "windows of many targets", float(not gather_is_exact((2,), 1, 90, (6, 1, 6), 9))
    yield "a step without a loss scale", settle_error(scaled=False, encoder=True, clip=2.0)
    yield "a step with a loss scale", settle_error(scaled=True, encoder=True, clip=2.0)
    yield "a step without clipping", settle_error(scaled=True, encoder=False, width=4097)
    yield "adam", adam_error(decoupled=False)
    yield "adamw", adam_error(decoupled=True)
    yield "adamw of some columns", adam_error(decoupled=True, columns=slice(8, 36))
    yield "adamw of fours", adam_error(decoupled=True, columns=slice(8, 36), width=52)
    yield "adamw of an odd number", adam_error(decoupled=True, width=49)
    yield "a rehearsal", 0.0 if rehearsed() else 1.0
    for name, keys in (("one key", 1), ("a key for each window", 37)):
        yield f"draws by {name}", float(not draws_agree("cpu", rows=41, batch=37, keys=keys))
    for number, sizes in enumerate([(1, 1, 1), (2, 70, 2, 40), (3, 300, 64), (1, 5, 700)]):
        yield f"norm {number} fp32", norm_error(sizes, torch.float32, torch.float32)
        yield f"norm {number} fp16", norm_error(sizes, torch.float16, torch.float16)
        yield f"norm {number} fp32 to fp16", norm_error(sizes, torch.float32, torch.float16)


def check_attention(count: int) -> Errors:
    for number, shape in enumerate(attention_shapes(count, most=Attention(3, 64, 5, 4, 64))):
        name, loose = f"attention {number}", number % 2 == 0
        yield f"{name} fp32", attention_error(shape, torch.float32, loose=loose)
        yield f"{name} fp16", attention_error(shape, torch.float16, loose=not loose)
    for dtype in (torch.float32, torch.float16):
        yield f"attention alone, {dtype}", float(not attention_is_the_same_alone(dtype))


def check_fused(_: int) -> Errors:
    for number, shape in enumerate(SHAPES):
        name = f"{shape.kind} {number}"
        yield f"{name} fp32", error_of(shape, torch.float32, resident=4 if number % 2 else 1)
        yield f"{name} fp16", error_of(shape, torch.float16, resident=1 if number % 2 else 4)


def check_stepwise(count: int) -> Errors:
    for number, shape in enumerate(stepwise_shapes(count)):
        name, loose = f"stepwise {shape.kind} {number}", number % 2 == 0
        yield f"{name} fp32", stepwise_error_of(shape, torch.float32, loose=loose)
        yield f"{name} fp16", stepwise_error_of(shape, torch.float16, loose=not loose)


def check_split(count: int) -> Errors:
    wide_kernels.split_forward = NotWaiting(wide_kernels.split_forward, "x")
    wide_kernels.split_backward = NotWaiting(wide_kernels.split_backward, "slots")
    for number, shape in enumerate(split_shapes(count)):
        name, loose = f"split {shape.kind} {number}", number % 2 == 0
        tile = split.TILES[number % 2]
        yield f"{name} fp16", stepwise_error_of(shape, torch.float16, loose=loose, tile=tile)


CHECKS = {
    "updates": check_updates,
    "attention": check_attention,
    "fused": check_fused,
    "stepwise": check_stepwise,
    "split": check_split,
}


if __name__ == "__main__":
    mended()
    guarded()
    torch.use_deterministic_algorithms(True)  # fills what `empty` gives with NaN
    json.dump(dict(CHECKS[sys.argv[1]](int(sys.argv[2]))), sys.stdout)
