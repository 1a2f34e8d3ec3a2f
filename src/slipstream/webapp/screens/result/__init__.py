"""Result: what a finished run predicts, where it errs, new data, exports."""
