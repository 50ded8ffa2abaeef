"""Experiments of arXiv:2205.05198: sequence parallelism and selective activation recomputation."""
