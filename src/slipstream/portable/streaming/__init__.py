"""Rows that come one by one: read, prepared and kept as context."""
