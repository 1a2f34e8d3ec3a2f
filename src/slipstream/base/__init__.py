"""Errors, text, statistics, storage and the machine: what everything else stands on."""
