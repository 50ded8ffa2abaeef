"""Comparison of a killed and resumed run with an undisturbed one: `mlm verify-resume`."""
