"""Evaluation of a checkpoint: loss on a corpus, zero-shot tasks, and lm-eval's tasks."""
