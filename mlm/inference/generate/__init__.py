"""Continuation of prompts by a checkpoint."""
