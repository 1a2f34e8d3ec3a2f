"""Data: the files below the folder, what they hold, plots of any part, and uploads."""
