"""Windows of the series as one kernel: the model's inputs and the targets."""

import math

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch

BLOCK = 1024


@triton.jit(do_not_specialize=["T", "B", "blocks", "target_blocks", "num_inputs"])
def _gather(
    inputs,
    targets,
    starts,
    context_rows,
    target_rows,
    out,
    out_targets,
    T,
    B,
    blocks,
    target_blocks,
    num_inputs,
    ROW: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first `num_inputs` programs copy inputs, `blocks` of them each step of time; the others
    copy targets, `target_blocks` of them each lane."""
    program = tl.program_id(0)
    if program < num_inputs:
        step, lane = program // blocks, program // blocks // T
        element = program % blocks * BLOCK + tl.arange(0, BLOCK)
        window = element // F
        valid = window < B
        first = tl.load(starts + lane.to(tl.int64) * B + window, mask=valid, other=0)
        row = first + tl.load(context_rows + step % T)
        value = tl.load(inputs + row * ROW + element % F, mask=valid)
        tl.store(out + step.to(tl.int64) * B * F + element, value, mask=valid)
    else:
        lane = (program - num_inputs) // target_blocks
        element = (program - num_inputs) % target_blocks * BLOCK + tl.arange(0, BLOCK)
        window = element // (H * C)
        valid = window < B
        first = tl.load(starts + lane.to(tl.int64) * B + window, mask=valid, other=0)
        row = first + tl.load(target_rows + element // C % H, mask=valid, other=0)
        value = tl.load(targets + row * ROW + element % C, mask=valid)
        tl.store(out_targets + lane.to(tl.int64) * B * H * C + element, value, mask=valid)


def gather_windows(
    inputs: Tensor, targets: Tensor, starts: Tensor, context_rows: Tensor, target_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return inputs [..., T, B, F] and targets [..., B, H, C] of the windows that begin at `starts`
    [..., B], from columns [rows, F] and [rows, C] of one table."""
    lanes, B = starts.shape[:-1], starts.shape[-1]
    K, T, H = math.prod(lanes), context_rows.numel(), target_rows.numel()
    F, C = inputs.shape[1], targets.shape[1]
    assert inputs.stride() == targets.stride()
    out = inputs.new_empty(*lanes, T, B, F)
    out_targets = targets.new_empty(*lanes, B, H, C)
    blocks, target_blocks = triton.cdiv(B * F, BLOCK), triton.cdiv(B * H * C, BLOCK)
    num_inputs = K * T * blocks
    if B:
        launch(
            _gather,
            (num_inputs + K * target_blocks,),
            *(inputs, targets, starts.contiguous(), context_rows, target_rows, out, out_targets),
            *(T, B, blocks, target_blocks, num_inputs),
            ROW=inputs.stride(0),
            F=F,
            C=C,
            H=H,
            BLOCK=BLOCK,
        )
    return out, out_targets
