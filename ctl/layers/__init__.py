"""Layers that users call: synchronized batch normalization and recomputation."""
