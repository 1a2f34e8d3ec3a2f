"""The HTTP server of a trained model. No torch."""
