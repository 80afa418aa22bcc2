"""Parts of the update, each opened by its key in `ctl.parts.config`."""
