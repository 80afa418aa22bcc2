"""Faults for tests: kills at exact points of a run, and of the workers of a launcher."""
