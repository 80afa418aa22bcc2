"""Orbit actions that a run calls after inner loops and evaluations."""
