"""Terminal output. Results go to stdout, progress to stderr; `cli` calls these functions."""
