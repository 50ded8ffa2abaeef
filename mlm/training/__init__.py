"""Training: trainer, loop, observers, saving, resuming, incidents."""
