"""Records of a run: metrics, terminal panel, curves, summaries, the page of a run."""
