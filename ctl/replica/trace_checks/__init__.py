"""Checks of a traced step: whether what it computes is a function of the global batch alone."""
