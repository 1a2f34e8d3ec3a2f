"""The HTTP server of `slipstream serve`. Does not import torch."""
