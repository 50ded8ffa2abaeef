"""AdamW, schedules, clipping, precision, optimizers of the user's own."""
