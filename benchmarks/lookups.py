"""The trainer of `benchmarks.embedding`: every row of an embedding is looked up once per epoch."""

import tensorflow as tf
import tf_keras

import ctl

_MULTIPLIER = 2_654_435_761  # odd, so that its multiples modulo a power of 2 are a permutation


class Lookups(ctl.data.Source):
    """Examples with the numbers of some rows, which differ in all examples."""

    def __init__(self, rows: int, lookups: int):
        self._rows, self._lookups = rows, lookups

    def __len__(self) -> int:
        return self._rows // self._lookups

    def gather(self, indexes: tf.Tensor) -> dict[str, tf.Tensor]:
        places = indexes[:, tf.newaxis] * self._lookups + tf.range(self._lookups, dtype=tf.int64)
        ids = places * _MULTIPLIER % self._rows
        # Far from the initial sums, so that no gradient is too small to change a row.
        return {"x": ids, "label": tf.cast(1 + indexes % 2, tf.float32)}


class LookupTrainer(ctl.StandardTrainer):
    """Trains the sums of the rows of each example towards 1 or 2."""

    def build_model(self) -> tf_keras.Model:
        options = self.options.model
        rows = options.mib * 2**20 // (4 * options.width)
        return tf_keras.Sequential(
            [
                tf_keras.layers.Input([options.lookups], dtype=tf.int64),
                tf_keras.layers.Embedding(rows, options.width),
                tf_keras.layers.GlobalAveragePooling1D(),
            ]
        )

    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> Lookups:
        options = self.options.model
        return Lookups(options.mib * 2**20 // (4 * options.width), options.lookups)

    def per_example_loss(self, batch: dict[str, tf.Tensor], outputs: tf.Tensor) -> tf.Tensor:
        return tf.square(tf.reduce_sum(outputs, axis=1) - batch["label"])
