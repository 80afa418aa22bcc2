"""The network with two convolutions of the tutorials, for 28 x 28 images and ten classes."""

import tf_keras

import ctl


class MnistTrainer(ctl.StandardTrainer):
    """Trains on any IDX dataset of this shape, such as MNIST and Fashion-MNIST."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Reshape((28, 28, 1), input_shape=(28, 28)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dropout(self.options.model.dropout),
                layers.Dense(10),
            ]
        )

    def build_dataset(self, split, input_context):
        return ctl.data.idx(self.options.data.dir, split)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}
