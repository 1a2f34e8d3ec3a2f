"""Compare: several runs side by side."""
