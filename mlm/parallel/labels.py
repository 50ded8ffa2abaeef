"""The label of what is not scored."""

IGNORE_INDEX = -100
"""In place of a label: no loss is taken there (the value of PyTorch and of `transformers`)."""
