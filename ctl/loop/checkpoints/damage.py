"""Distinguishes damaged checkpoint files from checkpoints of another trainer."""

import tensorflow as tf


class DamagedCheckpoint(Exception):
    """The files of a checkpoint exist and cannot be read; an older checkpoint may be intact."""


def is_damage(error: Exception) -> bool:
    """Whether an error is of the files, and not of the variables that they are read into."""
    # TensorFlow raises a bare OpError if an index file is not one.
    damage = (tf.errors.DataLossError, tf.errors.OutOfRangeError)
    missing = isinstance(error, tf.errors.NotFoundError) and "matching files" in str(error)
    return isinstance(error, damage) or type(error) is tf.errors.OpError or missing
