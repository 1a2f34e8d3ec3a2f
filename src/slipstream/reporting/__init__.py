"""Reports: one self-contained HTML page from the files of a run folder. No torch."""
