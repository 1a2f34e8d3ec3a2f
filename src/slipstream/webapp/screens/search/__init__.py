"""Search and pre-training: their forms, and the page of a search."""
