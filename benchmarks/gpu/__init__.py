"""Measurements and checks on a GPU, in an order of importance: `python -m benchmarks.gpu`."""
