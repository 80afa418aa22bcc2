"""Which of TensorFlow's errors mean that the files of a checkpoint are damaged."""

import pytest
import tensorflow as tf

from ctl.loop.checkpoints import damage


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.DataLossError(None, None, "Checksum does not match"),
        tf.errors.OutOfRangeError(None, None, "Read less bytes than requested"),
        tf.errors.OpError(None, None, "not an sstable", 2),
        tf.errors.NotFoundError(None, None, "Unsuccessful: Failed to find any matching files"),
    ],
)
def test_errors_of_the_files_are_damage(error):
    assert damage.is_damage(error)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.NotFoundError(None, None, "Key model/kernel not found in checkpoint"),
        tf.errors.InvalidArgumentError(None, None, "Shapes differ"),
        ValueError("Received incompatible tensor with shape (3,)"),
        AssertionError("No checkpointed value found"),
    ],
)
def test_errors_of_the_variables_are_not(error):
    assert not damage.is_damage(error)
