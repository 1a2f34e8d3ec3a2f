"""The runs of a folder as a table: list, compare, remove. No torch."""
