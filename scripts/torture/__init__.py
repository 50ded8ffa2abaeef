"""What scripts/torture_checkpoint.py is made of."""
