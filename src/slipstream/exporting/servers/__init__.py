"""Exports for servers: NVIDIA Triton, Ray Serve, containers."""
