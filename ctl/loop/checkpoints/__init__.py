"""Saves and restores the checkpoints of a trainer, and loads the weights of other runs."""
