"""The model, the data and the loss of PROJECT_NAME. Replace each by your own."""

import numpy as np
import tf_keras

import ctl

FEATURES, CLASSES = 8, 3


class Trainer(ctl.StandardTrainer):
    """Classifies points."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Dense(self.options.model.width, activation="relu", input_shape=(FEATURES,)),
                layers.Dropout(self.options.model.dropout),
                layers.Dense(CLASSES),
            ]
        )

    def build_dataset(self, split, input_context):
        # Single examples: ctl shuffles and batches them, and splits the batches over the replicas.
        count, seed = (3000, 1) if split == "train" else (500, 2)
        return ctl.data.arrays(make_examples(count, seed))

    def per_example_loss(self, batch, outputs):
        # One loss per example, not their mean: ctl divides by the size of the global batch.
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def make_examples(count, seed):
    """Makes points around one center per class."""
    draw = np.random.default_rng(seed)
    label = draw.integers(CLASSES, size=count)
    x = 2.0 * np.eye(CLASSES, FEATURES)[label] + draw.normal(size=(count, FEATURES))
    return {"x": x.astype(np.float32), "label": label.astype(np.int32)}
