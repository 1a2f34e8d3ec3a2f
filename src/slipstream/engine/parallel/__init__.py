"""Several processes that train one model, each with its share of every batch."""
