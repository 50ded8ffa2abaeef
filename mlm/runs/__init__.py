"""A run on disk: its settings and their checks, its folder, tokenizer and corpora."""
