"""A look at an experiment before a long run: `--mode=check`."""
