"""C99 source of a trained model, verified by the machine's compiler."""
