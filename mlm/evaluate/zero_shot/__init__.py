"""Zero-shot evaluations: WikiText-103 and LAMBADA, each by two protocols (guide: evaluation)."""
