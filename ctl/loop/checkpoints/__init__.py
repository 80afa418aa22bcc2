"""Checkpoints of a trainer: files, saving and restoring, when to save, other runs' weights."""
