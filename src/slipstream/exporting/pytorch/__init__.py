"""The model as a `torch.export` program."""
