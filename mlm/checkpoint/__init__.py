"""Checkpoints: format, save and load, tools; huggingface/ and megatron/ for those of others."""
