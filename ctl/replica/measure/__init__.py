"""Measurements of a step: losses, loss spikes, non-finite values, collected rows."""
