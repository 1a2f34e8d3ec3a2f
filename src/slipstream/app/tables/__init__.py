"""Tables in the browser: files of any size, read by processes of their own.

A version of a file (its path, size and time of change) has a folder in `.slipstream/tables`. Reader
processes write there what was found, and each column as float64 with the lowest and highest values
of stretches of rows, of which the server reads the few that a plot shows.
"""
