"""Functions with gradients of their own: attention, GELU, pooling, normalization."""
