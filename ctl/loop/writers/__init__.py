"""Where the logged values of a run go: one writer per file."""
