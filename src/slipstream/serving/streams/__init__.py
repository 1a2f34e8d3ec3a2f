"""Streams: rows in, predictions out, with a state for each id."""
