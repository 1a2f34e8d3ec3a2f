"""Looks at files without a config: what they hold, what is suspicious, and a config to begin with.

Files are read once, in batches, and nothing grows with the number of rows. Nothing imports torch.
"""
