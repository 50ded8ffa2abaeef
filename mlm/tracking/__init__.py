"""Records of a run: metrics, terminal panel, summaries, the page of a run."""
