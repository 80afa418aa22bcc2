"""The memory that a step needs, and ways to reduce it."""
