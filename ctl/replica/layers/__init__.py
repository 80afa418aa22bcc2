"""Layers: synchronized batch normalization and recomputation."""
