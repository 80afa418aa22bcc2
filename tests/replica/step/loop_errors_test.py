"""Errors of XLA in a training loop are explained in one line."""

import tensorflow as tf

from ctl.replica.step import loop_errors


def test_operation_without_a_deterministic_kernel_is_named():
    error = tf.errors.UnimplementedError(
        *(None, None),
        "Graph execution error:\nGPU MaxPool gradient ops do not yet have a deterministic XLA "
        "implementation.\n\t [[{{node gradient_tape/MaxPoolGrad}}]]",
    )
    assert loop_errors.explain_xla(error) == (
        "GPU MaxPool gradient ops do not yet have a deterministic XLA implementation, so "
        "runtime.deterministic must be false"
    )
