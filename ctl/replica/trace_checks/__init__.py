"""Checks that a traced step computes a function of the global batch alone."""
