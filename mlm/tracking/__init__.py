"""Records of a run: metrics, printed lines, the page of a run."""
