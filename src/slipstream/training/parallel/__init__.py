"""One model trained by several processes: who starts them, and what each does."""
