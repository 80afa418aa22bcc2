"""An experiment that counts how often each example was used: a checkpoint holds the complete history.

ctl benchmarks/counting.py
"""

import time

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

EXAMPLES, BATCH = 1003, 7  # no epoch ends at the end of a batch
EVAL_EXAMPLES, EVAL_BATCH = 1501, 10  # long enough for a kill to come during an evaluation


class CountingTrainer(ctl.StandardTrainer):
    """Counts in `consumed`, [epochs x examples], the examples that applied updates were computed from.

    The counts are saved with the weights. So a checkpoint holds the counts of the history that led to
    it, without the updates that a kill undid.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with self.strategy.scope():
            zeros = tf.zeros([self.options.model.epochs * EXAMPLES], tf.int32)
            self.consumed = tf.Variable(zeros, trainable=False, name="consumed", aggregation=first)

    def build_model(self):
        layers = tf_keras.layers
        hidden = layers.Dense(16, activation="relu", input_shape=(8,))
        return tf_keras.Sequential([hidden, layers.Dropout(0.3), layers.Dense(3)])

    def build_dataset(self, split, input_context):
        count = EXAMPLES if split == "train" else EVAL_EXAMPLES
        x = np.random.default_rng(0).normal(size=(count, 8)).astype("float32")
        label = x[:, :3].argmax(axis=1)
        return ctl.data.arrays({"x": x, "label": label, "index": np.arange(count)})

    def build_actions(self):
        seconds = self.options.model.pause
        return [Pause(seconds)] if seconds else []

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def replica_step(self, batch):
        result = super().replica_step(batch)
        rows = ctl.replica.current()
        row = rows.first_row + tf.range(tf.shape(batch["index"])[0], dtype=tf.int64)
        # The epoch follows from the step, the example from the data: both are checked.
        epoch = (rows.step * self.global_batch_size + row) // EXAMPLES
        real = tf.ones_like(row) if rows.row_mask is None else tf.cast(rows.row_mask, tf.int64)
        index = tf.where(real > 0, epoch * EXAMPLES + batch["index"], 0)
        # Each replica fills its rows of the global batch; the sum over replicas is complete. Padding
        # goes to an extra row at the end.
        local_indexes = tf.scatter_nd(
            tf.where(real > 0, row, self.global_batch_size)[:, tf.newaxis],
            index,
            [self.global_batch_size + 1],
        )
        context = tf.distribute.get_replica_context()
        indexes = context.all_reduce(tf.distribute.ReduceOp.SUM, local_indexes)[:-1]
        self.consumed.scatter_add(tf.IndexedSlices(tf.ones_like(indexes, tf.int32), indexes))
        return result


class Pause(ctl.Action):
    """Slows a run down, so that one of an hour leaves most of the processor to other programs."""

    at = "train"
    everywhere = True

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, outputs):
        time.sleep(self.seconds)


def check_consumed(consumed, steps):
    """Checks that a run used every example of every epoch exactly once.

    Args:
        consumed: the value of `CountingTrainer.consumed`.
        steps: number of steps of the run.

    Returns:
        The number of complete epochs, and the number of examples used in the incomplete last one.

    Raises:
        ValueError: an example was not used once.
    """
    epochs, rest = divmod(steps * BATCH, EXAMPLES)
    counts = np.append(consumed, np.zeros(-len(consumed) % EXAMPLES)).reshape(-1, EXAMPLES)
    wrong = np.argwhere(counts[:epochs] != 1)
    if len(wrong):
        epoch, example = wrong[0]
        raise ValueError(
            f"Example {example} was consumed {counts[epoch, example]:.0f} times in epoch {epoch}; "
            f"{len(wrong)} examples were not consumed once."
        )
    last = counts[epochs:]
    if last.sum() != rest or last.max(initial=0) > 1 or last[1:].any():
        raise ValueError(
            f"The last epoch has {last.sum():.0f} examples, but must have {rest}, each once."
        )
    return epochs, rest


def get_config():
    return ctl.config(
        trainer="counting.py:CountingTrainer",
        model=dict(epochs=70, pause=0.0),
        data=dict(global_batch_size=BATCH),
        eval=dict(global_batch_size=EVAL_BATCH),
        train=dict(steps=10_000),
    )
