"""The model, the data and the loss of PROJECT_NAME. Replace each by your own."""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

SIZE, CLASSES = 16, 2
VOID = 255  # the label of pixels that do not count
WEIGHTS = [1.0, 2.0]  # of the classes, in the loss of training


class Trainer(ctl.StandardTrainer):
    """Finds the class of each pixel, by a small U-Net."""

    def build_model(self):
        layers, width = tf_keras.layers, self.options.model.width
        inputs = tf_keras.Input((SIZE, SIZE, 3))
        fine = convolve(inputs, width)
        coarse = convolve(layers.MaxPool2D()(fine), 2 * width)
        upsampled = layers.Conv2DTranspose(width, 2, strides=2)(coarse)
        outputs = convolve(layers.Concatenate()([fine, upsampled]), width)
        return tf_keras.Model(inputs, layers.Conv2D(CLASSES, 1)(outputs))

    def build_dataset(self, split, input_context):
        # Single examples: ctl shuffles and batches them, and splits the batches over the replicas.
        if split != "train":
            return ctl.data.arrays(make_examples(128, seed=2))
        return ctl.data.augmented(ctl.data.arrays(make_examples(512, seed=1)), augment)

    def per_example_loss(self, batch, outputs):
        # One loss per pixel, not their mean: ctl divides by the weights of the global batch.
        label = tf.where(batch["label"] == VOID, 0, batch["label"])
        return tf_keras.losses.sparse_categorical_crossentropy(label, outputs, from_logits=True)

    def sample_weight(self, batch, training):
        counts = batch["label"] != VOID
        if not training:  # evaluations are not weighted by the class
            return tf.cast(counts, tf.float32)
        return tf.where(counts, tf.gather(WEIGHTS, tf.where(counts, batch["label"], 0)), 0.0)

    def build_metrics(self):
        # Metrics do not read sample_weight, which belongs to the loss.
        return {"iou": tf_keras.metrics.MeanIoU(CLASSES, ignore_class=VOID, sparse_y_pred=False)}


def convolve(inputs, width):
    layers = tf_keras.layers
    outputs = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    return layers.ReLU()(layers.BatchNormalization()(outputs))


def augment(example, seed):
    # Image and mask are one tensor here, so that both are moved and flipped in the same way.
    image, label = tf.cast(example["image"], tf.int32), example["label"][..., tf.newaxis]
    image = tf.pad(image, [[2, 2], [2, 2], [0, 0]])
    label = tf.pad(label, [[2, 2], [2, 2], [0, 0]], constant_values=VOID)
    move, flip = tf.unstack(tf.random.split(seed, 2))
    both = tf.concat([image, label], axis=-1)
    both = tf.image.stateless_random_crop(both, [SIZE, SIZE, 4], move)
    both = tf.image.stateless_random_flip_left_right(both, flip)
    return {"image": tf.cast(both[..., :3], tf.uint8), "label": both[..., 3]}


def make_examples(count, seed):
    """Makes images of noise with a bright square of class 1, whose border does not count."""
    draw = np.random.default_rng(seed)
    image = draw.integers(100, size=(count, SIZE, SIZE, 3))
    label = np.zeros((count, SIZE, SIZE), np.int32)
    for i, (row, column) in enumerate(draw.integers(2, SIZE - 8, size=(count, 2))):
        label[i, row - 1 : row + 7, column - 1 : column + 7] = VOID
        label[i, row : row + 6, column : column + 6] = 1
        image[i, row : row + 6, column : column + 6] += 100
    # Images of uint8 are scaled to numbers from 0 to 1.
    return {"image": image.astype(np.uint8), "label": label}
