"""Sources of sequences of different lengths."""
