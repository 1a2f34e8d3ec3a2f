"""Worker processes: one launcher that starts, watches and restarts them, on this machine or on Ray.

A batch system such as SLURM starts its processes itself; each calls the same task there."""
