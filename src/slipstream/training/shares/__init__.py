"""A run whose lanes are divided into shares, each trained by a worker of its own."""
