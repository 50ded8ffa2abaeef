"""AdamW, schedules, clipping, precision, custom optimizers."""
