"""Recurrent layers for many models at once, and other kernels of our own.

Shapes: K lanes (models), W directions, T steps of time, B windows, D inputs, H hidden units,
G gates (4 in an LSTM: input, forget, cell, output; 3 in a GRU: reset, update, new).
"""

from slipstream.kernels.attention import attention
from slipstream.kernels.available import by_kernel, triton_runs
from slipstream.kernels.launch import rehearsal
from slipstream.kernels.linear import linear
from slipstream.kernels.op import recurrent
from slipstream.kernels.shapes import Weights

__all__ = ["Weights", "attention", "by_kernel", "linear", "recurrent", "rehearsal", "triton_runs"]
