"""Raw text to tokens: read, clean, deduplicate, decontaminate and tokenise; data/ reads the result."""
