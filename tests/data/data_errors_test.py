"""Errors of a running input pipeline are reported in one line."""

import pytest
import tensorflow as tf

import ctl
from ctl.data.data_errors import report_data_errors


def ragged(lengths):
    """Examples of two features, one of which has another length in each example."""
    spec = {"b": tf.TensorSpec([]), "x": tf.TensorSpec([None])}
    examples = [{"b": 1.0, "x": [0.0] * length} for length in lengths]
    return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec)


# TensorFlow reports the shapes in other words if the first example has no elements.
@pytest.mark.parametrize("lengths", [(2, 3), (0, 1)])
def test_examples_of_different_shapes_are_named(lengths):
    dataset = ragged(lengths)
    spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape]), dataset.element_spec)
    with pytest.raises(ctl.UsageError) as error, report_data_errors("training", lambda: spec):
        list(dataset.batch(2))
    one, other = lengths
    assert str(error.value) == (
        f"x has shape [{one}] in one training example and [{other}] in another: pad or crop the "
        "examples to one shape in the dataset (tf.pad, tf.image.resize), or return "
        "ctl.data.GlobalBatches(dataset.padded_batch(...))."
    )


def test_other_errors_are_unchanged():
    error = tf.errors.InvalidArgumentError(None, None, "odd")
    with pytest.raises(type(error), match="odd"), report_data_errors("training", dict):
        raise error
