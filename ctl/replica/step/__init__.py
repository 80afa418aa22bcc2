"""The step: what composes arithmetic, layers, checks, updates and measurements."""
