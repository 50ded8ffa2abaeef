"""Ranks of a job: start, signals, failures; doctor/ checks hosts first."""
