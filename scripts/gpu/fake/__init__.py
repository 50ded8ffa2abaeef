"""Fake GPUs: PyTorch's own CUDA code runs to its end on a host without any."""
