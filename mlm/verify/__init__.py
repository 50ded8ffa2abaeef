"""Proofs by comparing runs: parity of layouts, verify-resume."""
