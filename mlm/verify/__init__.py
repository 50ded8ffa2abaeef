"""Checks of a layout and of resuming, by comparing runs."""
