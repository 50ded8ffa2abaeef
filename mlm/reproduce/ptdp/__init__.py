"""Experiments of PTD-P (arXiv:2104.04473): pipelines, tensor and data parallelism together."""
