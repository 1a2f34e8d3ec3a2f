"""Choose how to train by timing real steps on this machine."""
