"""Golden curves: the values that training computes in each step, saved to compare later runs with."""
