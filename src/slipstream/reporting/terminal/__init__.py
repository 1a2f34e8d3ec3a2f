"""Progress and results on the terminal."""
