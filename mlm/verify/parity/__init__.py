"""Comparison of a layout's training with one process: `mlm parity`."""
