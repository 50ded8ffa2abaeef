"""Checkpoints: the native format, saved and loaded at any layout, verified, compared, pruned."""
