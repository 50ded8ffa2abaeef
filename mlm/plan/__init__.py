"""Plans of a run, computed before it starts."""
