"""An experiment that remembers every example it was trained on: a checkpoint holds the whole history.

python -m ctl.main --config=benchmarks/counting.py
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

EXAMPLES, BATCH = 1003, 7  # no epoch ends with a batch
EVAL_EXAMPLES, EVAL_BATCH = 1501, 10  # an evaluation long enough to be hit


class CountingTrainer(ctl.StandardTrainer):
    """Counts in `consumed`, [epochs x examples], what the updates that were applied were made of.

    The counts are saved with the weights, so a checkpoint's are those of the history that it came by,
    and an update that a kill undid is not in them.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with self.strategy.scope():
            zeros = tf.zeros([self.options.model.epochs * EXAMPLES], tf.int32)
            self.consumed = tf.Variable(zeros, trainable=False, name="consumed", aggregation=first)

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Dense(16, activation="relu", input_shape=(8,)),
                layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )

    def build_dataset(self, split, input_context):
        count = EXAMPLES if split == "train" else EVAL_EXAMPLES
        x = np.random.default_rng(0).normal(size=(count, 8)).astype("float32")
        label = x[:, :3].argmax(axis=1)
        return ctl.data.arrays({"x": x, "label": label, "index": np.arange(count)})

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def replica_step(self, batch):
        value = super().replica_step(batch)
        whole = ctl.replica.current()
        row = whole.first_row + tf.range(tf.shape(batch["index"])[0], dtype=tf.int64)
        # The epoch is told by the step, the example by what the data brought.
        epoch = (whole.step * self.global_batch_size + row) // EXAMPLES
        ones = tf.ones_like(row) if whole.present is None else tf.cast(whole.present, tf.int64)
        places = tf.where(ones > 0, epoch * EXAMPLES + batch["index"], 0)
        # Rows of all replicas, each in its place: 0 where another replica's are, or none.
        mine = tf.scatter_nd(
            tf.where(ones > 0, row, self.global_batch_size)[:, tf.newaxis],
            places,
            [self.global_batch_size + 1],
        )
        context = tf.distribute.get_replica_context()
        rows = context.all_reduce(tf.distribute.ReduceOp.SUM, mine)[:-1]
        self.consumed.scatter_add(tf.IndexedSlices(tf.ones_like(rows, tf.int32), rows))
        return value


def check_consumed(consumed, steps):
    """What a run of so many steps consumed: every example of every epoch once, or a ValueError.

    Args:
        consumed: the values of the trainer's variable of that name.
        steps: that the run made.

    Returns:
        How many whole epochs there are, and how many examples of the one begun.
    """
    epochs, begun = divmod(steps * BATCH, EXAMPLES)
    counts = np.append(consumed, np.zeros(-len(consumed) % EXAMPLES)).reshape(-1, EXAMPLES)
    wrong = np.argwhere(counts[:epochs] != 1)
    if len(wrong):
        epoch, example = wrong[0]
        raise ValueError(
            f"Example {example} was consumed {counts[epoch, example]:.0f} times in epoch {epoch}, "
            f"the first of {len(wrong)} such."
        )
    rest = counts[epochs:]
    if rest.sum() != begun or rest.max(initial=0) > 1 or rest[1:].any():
        raise ValueError(f"The last epoch has {rest.sum():.0f} examples, want {begun} once each.")
    return epochs, begun


def get_config():
    return ctl.config(
        trainer="counting.py:CountingTrainer",
        model=dict(epochs=70),
        data=dict(global_batch_size=BATCH),
        eval=dict(global_batch_size=EVAL_BATCH),
        train=dict(steps=10_000),
    )
