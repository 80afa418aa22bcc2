"""Distinguishes damaged checkpoint files from checkpoints of another trainer."""

import tensorflow as tf


class DamagedCheckpoint(Exception):
    """Raised if files of a checkpoint cannot be read; an older checkpoint may be intact."""


def is_damage(error: Exception) -> bool:
    """Returns whether an error is caused by the files, not by the variables to restore."""
    # TensorFlow raises a bare OpError if an index file is not one.
    damage = (tf.errors.DataLossError, tf.errors.OutOfRangeError)
    missing = isinstance(error, tf.errors.NotFoundError) and "matching files" in str(error)
    return isinstance(error, damage) or type(error) is tf.errors.OpError or missing
