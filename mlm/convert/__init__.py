"""Formats of other libraries, read and written, and `Source`: the model that a name refers to."""
