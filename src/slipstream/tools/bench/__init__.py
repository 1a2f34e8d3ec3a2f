"""Measurements: the ladder of techniques, peers, parity."""
