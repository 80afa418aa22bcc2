"""The config of an experiment: its keys and defaults, how they are set, loaded and checked."""
