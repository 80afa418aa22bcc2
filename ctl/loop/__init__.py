"""The outer loop: when to train, save and evaluate, and what a person sees of it."""
