"""Experiments of the papers: `python scripts/reproduce.py`. Nothing of `mlm` imports this package."""
