"""Predict with a trained model, compute metrics, and summarize them beside the baselines."""
