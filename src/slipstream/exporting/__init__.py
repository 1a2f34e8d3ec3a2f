"""Trained models as files that run without Slipstream, each verified against the model."""
