"""Small trainers in float32, and the golden file of the first one."""

import functools

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.testing import tiny
from ctl.testing.golden import recording

EXAMPLES = {k: v.astype(np.float32) if k == "x" else v for k, v in tiny.examples(40).items()}
STEPS = 6  # of 8 examples: each of the 40 is used once, and some twice
strategy = functools.cache(testing.make_strategy)


class Tiny(tiny.TinyTrainer):
    """Trains on EXAMPLES."""

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(EXAMPLES)


class OtherLabel(Tiny):
    """One of the 40 labels is another class."""

    def build_dataset(self, split, input_context):
        label = np.where(np.arange(40) == 9, 3 - EXAMPLES["label"], EXAMPLES["label"])
        return ctl.data.arrays({**EXAMPLES, "label": label})


class ReversedRows(Tiny):
    """Computes the same, but sums gradients over the rows in reverse order."""

    def forward(self, batch, training):
        outputs = self.model(tf.reverse(batch["x"], axis=[0]), training=training)
        return tf.reverse(outputs, axis=[0])


class Wider(Tiny):
    """Has another model."""

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(7), tf_keras.layers.Dense(3)])


def make(cls=Tiny, *, replicas=1, batch=8, optimizer=None, **options):
    tf_keras.backend.reset_uids()
    return cls(
        strategy=strategy(replicas),
        global_batch_size=batch,
        optimizer=optimizer or (lambda: tf_keras.optimizers.Adam(1e-2)),
        options=ctl.TrainerOptions(**{"xla": "off", **options}),
    )


@functools.cache
def recorded():
    """The golden curve of `Tiny` on one replica."""
    return recording.record(make(), STEPS, measure_tolerance=True)


@functools.cache
def curve(cls=Tiny, **options):
    """What a changed trainer computes."""
    return recording.record(make(cls, **options), STEPS, measure_tolerance=False)
