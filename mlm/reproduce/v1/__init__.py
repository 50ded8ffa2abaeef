"""Experiments of Megatron-LM, arXiv:1909.08053."""
