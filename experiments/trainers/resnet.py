"""ResNet-50 (He et al. 2016) for 224 x 224 images and a thousand classes."""

import tensorflow as tf
import tf_keras

import ctl

_IMAGE = (224, 224, 3)
_CLASSES = 1000


class NoisyClasses(ctl.data.Source):
    """Synthetic data of ImageNet's size: noise images with a bright row that depends on the class."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def gather(self, indexes):
        image = tf.map_fn(_image, indexes, fn_output_signature=tf.TensorSpec(_IMAGE, tf.uint8))
        return {"image": image, "label": tf.cast(indexes % _CLASSES, tf.int32)}


def _image(index):
    seed = tf.stack([index, tf.zeros_like(index)])
    noise = tf.random.stateless_uniform(_IMAGE, seed=seed, maxval=128, dtype=tf.int32)
    rows = tf.range(_IMAGE[0], dtype=tf.int64)[:, tf.newaxis, tf.newaxis]
    bright = tf.where(rows == index % _CLASSES % _IMAGE[0], 127, 0)
    return tf.cast(noise + bright, tf.uint8)


class ResNetTrainer(ctl.StandardTrainer):
    """Trains the network of tf_keras.applications on synthetic images."""

    def build_model(self):
        model = tf_keras.applications.ResNet50(
            weights=None, input_shape=_IMAGE, classes=_CLASSES, classifier_activation=None
        )
        if self.options.model.get("recompute") == "blocks":
            ctl.recompute(model, blocks="*_out")  # the 16 residual blocks
        return model

    def build_dataset(self, split, input_context):
        return NoisyClasses(1_281_167 if split == "train" else 50_000)

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
