"""The model, the data and the loss of PROJECT_NAME. Replace each by your own."""

import numpy as np
import tf_keras

import ctl

SIZE, CLASSES = 16, 3


class Trainer(ctl.StandardTrainer):
    """Classifies images."""

    def build_model(self):
        layers, width = tf_keras.layers, self.options.model.width
        return tf_keras.Sequential(
            [
                # Each image is flipped or moved by random numbers of its own, only in training.
                layers.RandomFlip("vertical", input_shape=(SIZE, SIZE, 3)),
                layers.RandomTranslation(0.1, 0.1),
                layers.Conv2D(width, 3, padding="same", activation="relu"),
                layers.MaxPool2D(),
                layers.Conv2D(width, 3, padding="same", activation="relu"),
                layers.GlobalMaxPool2D(),
                layers.Dropout(self.options.model.dropout),
                layers.Dense(CLASSES),
            ]
        )

    def build_dataset(self, split, input_context):
        # Single examples: ctl shuffles and batches them, and splits the batches over the replicas.
        # Your own images, in a folder with one subfolder per class:
        #     return ctl.data.image_folder(f"data/{split}", size=(SIZE, SIZE))
        count, seed = (1000, 1) if split == "train" else (256, 2)
        return ctl.data.arrays(make_examples(count, seed))

    def per_example_loss(self, batch, outputs):
        # One loss per example, not their mean: ctl divides by the size of the global batch.
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def make_examples(count, seed):
    """Makes images of noise with a bar: class 0 horizontal, 1 vertical, 2 both."""
    draw = np.random.default_rng(seed)
    label = draw.integers(CLASSES, size=count)
    image = draw.integers(100, size=(count, SIZE, SIZE, 3))
    for i, (row, column) in enumerate(draw.integers(2, SIZE - 2, size=(count, 2))):
        if label[i] != 1:
            image[i, row, 2:-2] += 150
        if label[i] != 0:
            image[i, 2:-2, column] += 150
    # Images of uint8 are scaled to numbers from 0 to 1.
    return {"image": image.clip(max=255).astype(np.uint8), "label": label.astype(np.int32)}
