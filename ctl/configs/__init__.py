"""The config of an experiment: its keys and defaults, how they are set, loaded and checked.

No module of this package imports TensorFlow, so that a mistake in a config is reported at once.
"""
