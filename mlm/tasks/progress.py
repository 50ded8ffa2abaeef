"""A progress bar for commands that work through bytes; terminal.py has it."""

from mlm.terminal import Advance, byte_progress

__all__ = ["Advance", "byte_progress"]
