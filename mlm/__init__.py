"""Megatron-style model parallelism you can read, run on a laptop and trust at 512 GPUs."""

__version__ = "0.1.0"
