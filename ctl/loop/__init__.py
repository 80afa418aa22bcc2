"""The outer loop: when to train, save and evaluate, and what the user sees of it."""
