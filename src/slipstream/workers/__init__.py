"""Worker processes on this machine: how many, where each runs, how they are started, watched and
stopped. Each reads a task as JSON from stdin and writes its events to stdout."""
