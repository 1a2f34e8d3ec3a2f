"""Trackers: what is sent to TensorBoard, MLflow and Weights & Biases."""
