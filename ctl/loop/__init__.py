"""The outer loop: decides when to train, save and evaluate, and reports the progress."""
