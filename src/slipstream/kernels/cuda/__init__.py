"""Kernels in CUDA C++, compiled by NVRTC, which comes with PyTorch."""
