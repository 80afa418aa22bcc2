"""Faults for tests: kills at exact points, damaged checkpoints, NaN in a batch, lost workers."""
