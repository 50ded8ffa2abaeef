"""Reports of a training run: metrics.jsonl, terminal, trackers, curves, summary."""
