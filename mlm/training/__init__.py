"""Pretraining: settings, trainer, loop, observers, run folder, resume, incidents."""
