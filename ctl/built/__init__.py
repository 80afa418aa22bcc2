"""How a step or an evaluation is built from a user's code, and what is read of it."""
