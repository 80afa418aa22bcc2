"""The arithmetic of a replica: the mask of its rows, loss, gradients, reductions, precision."""
