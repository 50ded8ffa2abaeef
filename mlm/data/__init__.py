"""Tokens to samples: tokenizers, .bin/.idx files of corpus/, samplers, blends, conversations."""
