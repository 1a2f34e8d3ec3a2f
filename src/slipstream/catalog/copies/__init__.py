"""Copies of runs in object storage."""
