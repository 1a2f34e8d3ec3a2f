"""Measures on the user's own machine: what each technique brings, and that accuracy held."""
