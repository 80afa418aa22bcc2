"""Golden curves: what training computes in each step, kept in a file to compare later runs with."""
