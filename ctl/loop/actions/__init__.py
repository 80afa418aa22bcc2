"""Orbit actions: what a run does at the end of inner loops and evaluations, one action per file."""
