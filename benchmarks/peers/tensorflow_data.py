"""The examples of a task by tf.data, for the programs on TensorFlow."""

import tensorflow as tf


def dataset(task):
    """Returns endless full batches of (inputs, labels)."""
    arrays = task.floats()
    if "user" in arrays:
        examples = tf.data.Dataset.from_tensor_slices((arrays, arrays["item"]))
    else:
        examples = tf.data.Dataset.from_tensor_slices((arrays["x"], arrays["label"]))
    examples = examples if task.check else examples.shuffle(10_000)
    return examples.repeat().batch(task.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
