"""Compiling the real step for a TPU slice, ahead of time, on a machine that has none."""
