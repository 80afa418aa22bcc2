"""The model, the data and the loss of PROJECT_NAME. Replace each by your own."""

import functools

import numpy as np
import tf_keras

import ctl

LENGTH, VOCABULARY = 12, 1000
FILLERS = ["the", "a", "this", "film", "book", "song", "with", "and", "about", "rather", "really"]
OPINIONS = [["bad", "boring", "awful", "poor"], ["good", "funny", "great", "lovely"]]


class Trainer(ctl.StandardTrainer):
    """Classifies texts as negative or positive."""

    def build_model(self):
        layers, width = tf_keras.layers, self.options.model.width
        return tf_keras.Sequential(
            [
                # The token 0 is padding, which the average leaves out.
                layers.Embedding(VOCABULARY, width, mask_zero=True, input_length=LENGTH),
                layers.GlobalAveragePooling1D(),
                layers.Dense(width, activation="relu"),
                layers.Dropout(self.options.model.dropout),
                layers.Dense(len(OPINIONS)),
            ]
        )

    def build_dataset(self, split, input_context):
        # Single examples: ctl shuffles and batches them, and splits the batches over the replicas.
        # Texts of very different lengths: ctl.data.sequences and ctl.data.bucketed.
        count, seed = (2000, 1) if split == "train" else (500, 2)
        return ctl.data.arrays(make_examples(count, seed))

    def per_example_loss(self, batch, outputs):
        # One loss per example, not their mean: ctl divides by the size of the global batch.
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def make_examples(count, seed):
    """Makes texts, and divides them into tokens."""
    texts, label = make_texts(count, seed)
    return {"tokens": make_tokenizer()(texts).numpy(), "label": label}


def make_texts(count, seed):
    """Makes texts of several lengths, each with one word that tells its class."""
    draw = np.random.default_rng(seed)
    label = draw.integers(len(OPINIONS), size=count).astype(np.int32)
    texts = []
    for opinion in label:
        words = [
            *draw.choice(FILLERS, size=draw.integers(3, LENGTH)),
            draw.choice(OPINIONS[opinion]),
        ]
        texts.append(" ".join(draw.permutation(words)))
    return texts, label


@functools.cache
def make_tokenizer():
    """Makes a tokenizer of the words of the training examples."""
    tokenizer = tf_keras.layers.TextVectorization(
        max_tokens=VOCABULARY, output_sequence_length=LENGTH
    )
    tokenizer.adapt(make_texts(2000, seed=1)[0])
    return tokenizer
