"""Where a run's steps are computed."""
