"""Writers of the logged values of a run, one per file."""
