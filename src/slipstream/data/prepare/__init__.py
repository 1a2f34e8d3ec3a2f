"""Preparation of the columns of one series, row by row in time order.

A column is float64 with NaN where a value is missing. Times are microseconds (int64) for dates and
timestamps, or float64 for plain numbers. Errors say what is wrong; the caller adds the step and the
file.

No result depends on later rows, except where a look-ahead is declared, nor on where a slice begins
once it has as many rows as the function looks back: both hold to the bit. So a table may be cut or
read in parts.
"""
