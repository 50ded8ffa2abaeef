"""Parts of scripts/torture_checkpoint.py."""
