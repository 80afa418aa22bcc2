"""Parts of the step, each opened by its row in `part.PARTS`."""
