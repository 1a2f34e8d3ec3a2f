"""The networks in numpy, by the weights that training saved: whole windows, or row after row.

Shapes, as in `slipstream.models`: T context rows, B sequences (windows, or one per independent
channel), F inputs, K numbers beside them, H predicted rows, C targets, Q quantiles or classes, D a
width. Time comes first in what a network reads: [T, B, F]. All arrays are float32.
"""
