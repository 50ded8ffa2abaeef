"""Tokens to samples: tokenizers, .bin/.idx, samplers, blends, conversations (reads what corpus/ writes)."""
