"""Parts of the update, each opened by its row in `ctl.update.part.PARTS`."""
