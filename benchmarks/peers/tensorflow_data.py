"""The examples of a task by tf.data, for the programs on TensorFlow."""

import tensorflow as tf


def dataset(task):
    """Returns endless full batches of (inputs, labels), in another order each epoch.

    It gathers whole batches from the arrays, which suits examples of a few numbers: a dataset of single
    examples with `shuffle` and `batch` handles one after the other.
    """
    arrays = {name: tf.constant(array) for name, array in task.floats().items()}
    count = len(next(iter(arrays.values())))

    def make_epoch(_):
        order = tf.range(count)
        order = order if task.check else tf.random.shuffle(order)
        return tf.data.Dataset.from_tensor_slices(tf.reshape(order, [-1, task.batch]))

    def gather(rows):
        batch = {name: tf.gather(array, rows) for name, array in arrays.items()}
        return (batch, batch["item"]) if "item" in batch else (batch["x"], batch["label"])

    batches = tf.data.Dataset.counter().flat_map(make_epoch)
    return batches.map(gather, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)
