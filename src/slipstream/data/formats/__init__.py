"""One reader for each format of file."""
