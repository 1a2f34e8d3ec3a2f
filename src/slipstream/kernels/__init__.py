"""Recurrent layers for many models at once, and other kernels of our own.

Shapes: K lanes (models), W directions, T steps of time, B windows, D inputs, H hidden units,
G gates (4 in an LSTM: input, forget, cell, output; 3 in a GRU: reset, update, new).
"""

from slipstream.kernels.launch import (
    is_triton_usable,
    precompile,
    prepare_device,
    should_use_triton,
)
from slipstream.kernels.layers import attention, causal_conv, linear
from slipstream.kernels.native import trees as native_trees
from slipstream.kernels.native.library import build_library, find_compiler, find_library
from slipstream.kernels.native.rnn import KERNELS as NATIVE_KERNELS
from slipstream.kernels.rnn.dispatch import (
    continue_rnn_layer,
    explain_no_half_kernels,
    has_cuda_kernels,
    rnn_layer,
)
from slipstream.kernels.rnn.weights import LayerWeights

__all__ = [
    "NATIVE_KERNELS",
    "LayerWeights",
    "attention",
    "build_library",
    "causal_conv",
    "continue_rnn_layer",
    "explain_no_half_kernels",
    "find_compiler",
    "find_library",
    "has_cuda_kernels",
    "is_triton_usable",
    "linear",
    "native_trees",
    "precompile",
    "prepare_device",
    "rnn_layer",
    "should_use_triton",
]
