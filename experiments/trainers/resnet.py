"""ResNet-50 (He et al. 2016) for color images, of 224 x 224 pixels and a thousand classes by default."""

import tensorflow as tf
import tf_keras

import ctl


class NoisyClasses(ctl.data.Source):
    """Synthetic data: square noise images with a bright row that depends on the class."""

    def __init__(self, count, *, size, classes):
        self._count, self._size, self._classes = count, size, classes

    def __len__(self):
        return self._count

    def gather(self, indexes):
        spec = tf.TensorSpec([self._size, self._size, 3], tf.uint8)
        image = tf.map_fn(self._image, indexes, fn_output_signature=spec)
        return {"image": image, "label": tf.cast(indexes % self._classes, tf.int32)}

    def _image(self, index):
        seed, size = tf.stack([index, tf.zeros_like(index)]), self._size
        noise = tf.random.stateless_uniform([size, size, 3], seed, maxval=128, dtype=tf.int32)
        rows = tf.range(size, dtype=tf.int64)[:, tf.newaxis, tf.newaxis]
        bright = tf.where(rows == index % self._classes % size, 127, 0)
        return tf.cast(noise + bright, tf.uint8)


class ResNetTrainer(ctl.StandardTrainer):
    """Trains the network of tf_keras.applications on synthetic images."""

    def build_model(self):
        size, classes = self.options.model.size, self.options.model.classes
        model = tf_keras.applications.ResNet50(
            weights=None, input_shape=(size, size, 3), classes=classes, classifier_activation=None
        )
        if self.options.model.get("recompute") == "blocks":
            ctl.recompute(model, blocks="*_out")  # the 16 residual blocks
        return model

    def build_dataset(self, split, input_context):
        count = 1_281_167 if split == "train" else 50_000  # as ImageNet has
        return NoisyClasses(count, size=self.options.model.size, classes=self.options.model.classes)

    def preprocess(self, batch):
        return {**batch, "image": tf.cast(batch["image"], self.compute_dtype) / 127.5 - 1.0}

    def forward(self, batch, training):
        return self.model(batch["image"], training=training)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}
