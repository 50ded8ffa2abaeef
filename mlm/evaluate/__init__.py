"""Evaluation protocols: loss on a corpus, zero-shot tasks, lm-eval's tasks."""
