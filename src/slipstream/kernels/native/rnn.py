"""Recurrent layers on a CPU by one call of C code a pass: `rnn.c` says how.

Shapes as in `kernels.rnn`: K lanes, W directions, T steps, B windows, D inputs, H units.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.kernels.native import library
from slipstream.kernels.rnn.weights import ONE_BACKWARD, LayerWeights

KERNELS = ["rnn_forward", "rnn_backward"]
SLICE, MAX_SLICES = 32, 16
"""The number of windows whose weight gradients are summed separately, and the largest number of
such sums: they depend on the batch alone, so that results do not depend on the number of threads"""

_Pointers = ctypes.c_void_p * 4
_States = tuple[Tensor | None, Tensor | None]
ZEROS: _States = (None, None)
"""The default initial state (zeros), and no output for c after the last step"""


class _Call(ctypes.Structure):
    """The arguments of both passes, in the order of `Call` in the C code."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("is_lstm", "K", "W", "T", "B", "D", "H")),
        *((name, ctypes.c_int64) for name in ("slices", "threads")),
        ("x", ctypes.c_void_p),
        ("weights", _Pointers),
        *((name, ctypes.c_void_p) for name in ("y", "slots", "carry", "before", "after", "dy")),
        *((name, ctypes.c_int64) for name in ("dy_lane", "dy_time", "dy_row")),
        ("dx", ctypes.c_void_p),
        ("grads", _Pointers),
        *((name, ctypes.c_void_p) for name in ("parallel", "number")),
    )


def is_supported(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the library is built and supports the precision of these products of x."""
    fits = x.device.type == "cpu" and x.dtype == dtype == torch.float32
    return fits and not torch.compiler.is_compiling() and library.find_library() is not None


def run_layer(kind: str, last: bool, x: Tensor, weights: LayerWeights) -> Tensor:
    """Map x [K, T, B, D] to [K, T, B, W * H], or with `last` to [K, B, W * H]."""
    return _apply(kind == "lstm", last, ZEROS, x, weights)


def continue_layer(
    kind: str, x: Tensor, before: Tensor, weights: LayerWeights
) -> tuple[Tensor, Tensor]:
    """Map x [1, T, B, D] and the state before it, [P, B, H], to [1, T, B, H] and the state after
    it; the gradient ends at the state. P is 2 in an LSTM (h and c), 1 in a GRU."""
    is_lstm = kind == "lstm"
    after = x.new_empty(before.shape[1:]) if is_lstm else None
    out = _apply(is_lstm, False, (before.contiguous(), after), x, weights)
    last = out.detach()[0, -1]
    return out, last[None].clone() if after is None else torch.stack([last, after])


def _apply(is_lstm: bool, last: bool, states: _States, x: Tensor, weights: LayerWeights) -> Tensor:
    # within torch.no_grad, needs_input_grad is True for parameters as well
    has_grad = torch.is_grad_enabled()
    out: Tensor = _NativeRnn.apply(is_lstm, last, has_grad, states, x, *weights)  # type: ignore[no-untyped-call]
    return out


class _NativeRnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        is_lstm: bool,
        last: bool,
        has_grad: bool,
        states: _States,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        x, weights = x.contiguous(), tuple(weight.contiguous() for weight in weights)
        K, T, B, _ = x.shape
        W, H = weights[1].shape[1], weights[1].shape[3]
        y = x.new_empty(K, T, B, W * H)
        saved = None
        if has_grad and any(ctx.needs_input_grad):
            vector: int = library.find_library().rnn_vector()
            units = -(-H // vector) * vector
            saved = x.new_empty(K, W, T, B, 6 if is_lstm else 5, units)
            ctx.save_for_backward(x, y, saved, *weights)
            ctx.is_lstm, ctx.last, ctx.done, ctx.before = is_lstm, last, False, states[0]
        call = _describe(is_lstm, x, weights, y, saved)
        call.before, call.after = map(_locate, states)
        call.slices = min(max(B, 1), -(-call.threads // K))
        _check(library.find_library().rnn_forward(ctypes.byref(call)))
        return _select_last(y, W) if last else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise RuntimeError(ONE_BACKWARD)
        ctx.done = True
        x, y, saved, *weights = ctx.saved_tensors
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[4] else None
        grads = [torch.empty_like(weight) for weight in weights]
        call = _describe(ctx.is_lstm, x, weights, y, saved)
        call.before = _locate(ctx.before)
        call.slices = min(max(-(-call.B // SLICE), 1), MAX_SLICES)
        call.dy, call.dy_lane, call.dy_row = dy.data_ptr(), dy.stride(0), dy.stride(-2)
        call.dy_time = 0 if ctx.last else dy.stride(1)
        call.dx = _locate(dx)
        call.grads = _point_at(grads)
        _check(library.find_library().rnn_backward(ctypes.byref(call)))
        return None, None, None, None, dx, *grads


def _describe(
    is_lstm: bool, x: Tensor, weights: Sequence[Tensor], y: Tensor, saved: Tensor | None
) -> _Call:
    """Describe the layer; what the passes do not share is left empty."""
    W, H = weights[1].shape[1], weights[1].shape[3]
    call = _Call(is_lstm, x.shape[0], W, *x.shape[1:], H)
    call.threads = torch.get_num_threads()
    call.parallel, call.number = library.find_threading()
    call.x, call.y, call.weights = x.data_ptr(), y.data_ptr(), _point_at(weights)
    if saved is not None:
        num_slots, width = 4, saved.shape[4]
        call.slots = saved.data_ptr()
        of_slots = saved.numel() * num_slots // width
        call.carry = saved.data_ptr() + of_slots * saved.element_size()
    return call


def _locate(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _point_at(tensors: Sequence[Tensor]) -> Any:
    return _Pointers(*(tensor.data_ptr() for tensor in tensors))


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("not enough memory for the recurrent layer")


def _select_last(y: Tensor, W: int) -> Tensor:
    """Return each direction's last output, [K, B, W * H]; the second direction ends at the first
    step."""
    if W == 1:
        return y[:, -1]
    H = y.shape[-1] // 2
    return torch.cat([y[:, -1, :, :H], y[:, 0, :, H:]], dim=-1)
