"""Pretraining from initial weights or from a checkpoint."""
