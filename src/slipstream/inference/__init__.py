"""Trained runs together with data: their own again, or new."""
