"""ONNX graphs of trained models, built from their weights without torch."""
