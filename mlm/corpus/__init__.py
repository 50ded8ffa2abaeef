"""Raw text to tokens: read, clean, deduplicate, decontaminate, tokenise (writes what data/ reads)."""
