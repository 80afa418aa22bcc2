"""Measurements of a step: norms, histograms, loss spikes, non-finite values."""
