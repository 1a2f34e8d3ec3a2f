"""Preparation of the rows between the file and the windows (`data.prepare`).

| module | subject |
|---|---|
| `steps` | one class for each step: what it reads, its rows, a stream of rows, its C code |
| `chain` | the plan of all steps, and the tables after them: in memory, or read in parts |
| `rows` | the steps one row after the other, for streams |
| `frames` | the rows of a series while steps change them |
| `formulas`, `calendars`, `joins`, `resampling`, `rolling` | what steps compute |
| `c_code` | the C statements that steps write |

A column is float64 with NaN where a value is missing. Times are microseconds (int64) for dates and
timestamps, or float64 for plain numbers. Errors say what is wrong; the caller adds the step and the
file.

No result depends on later rows, except where a look-ahead is declared, nor on where a slice begins
once it has as many rows as the function looks back: both hold to the bit. So a table may be cut or
read in parts.
"""
