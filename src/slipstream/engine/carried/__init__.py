"""A state that is carried on from row to row: batches in training, and predictions."""
