"""Parts of scripts/compare_conversions.py."""
