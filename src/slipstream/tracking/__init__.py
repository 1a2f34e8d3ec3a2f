"""Sends what a run logs to an experiment tracker: TensorBoard, MLflow or Weights & Biases."""
