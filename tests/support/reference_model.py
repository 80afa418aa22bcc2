"""A small model as a trainer, and its loss and gradients computed by hand in numpy.

outputs = tanh([x, E[token]] W + b) V + c; loss = cross entropy of the logits + 0.1 sum(W^2).
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

EXAMPLES = 23
PENALTY = 0.1
TOKENS, CLASSES, HIDDEN, WIDTH, FEATURES = 6, 3, 5, 2, 4


def examples(count=EXAMPLES, seed=0):
    """Makes distinct examples with sample weights."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, FEATURES)) * rng.uniform(0.1, 3, (count, 1)),
        "token": rng.integers(0, TOKENS, count),
        "label": rng.integers(0, CLASSES, count),
        "weight": rng.uniform(0.2, 3.0, count),
    }


def as_dataset(split):
    return tf.data.Dataset.from_tensor_slices(examples())


def of_unknown_size(split):
    return as_dataset(split).filter(lambda rows: rows["label"] >= 0)


def as_global_batches(split):
    return ctl.data.GlobalBatches(as_dataset(split).batch(8))


class ReferenceTrainer(ctl.StandardTrainer):
    """The model as a trainer; `data_factory(split)` makes its data."""

    data_factory = staticmethod(lambda split: ctl.data.arrays(examples()))
    dropout = 0.0
    weighted = True

    def build_model(self):
        layers = tf_keras.layers
        x = tf_keras.Input([FEATURES])
        token = tf_keras.Input([], dtype=tf.int64)
        embedded = layers.Embedding(TOKENS, WIDTH)(token)
        penalty = tf_keras.regularizers.L2(PENALTY)
        dense = layers.Dense(HIDDEN, activation="tanh", kernel_regularizer=penalty)
        hidden = dense(layers.Concatenate()([x, embedded]))
        if self.dropout:
            hidden = layers.Dropout(self.dropout)(hidden)
        outputs = layers.Dense(CLASSES)(hidden)
        return tf_keras.Model({"x": x, "token": token}, outputs)

    def build_dataset(self, split, input_context):
        return self.data_factory(split)

    def preprocess(self, batch):
        return {**batch, "x": tf.cast(batch["x"], self.compute_dtype)}

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def sample_weight(self, batch):
        return batch["weight"] if self.weighted else None

    def build_metrics(self):
        return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}


def make_trainer(strategy, batch, *, cls=ReferenceTrainer, optimizer=None, **options):
    """Makes a trainer in float64. Under the default SGD with rate 1 the update is the gradient."""
    options.setdefault("precision", "float64")
    return cls(
        strategy=strategy,
        global_batch_size=batch,
        optimizer=optimizer or (lambda: tf_keras.optimizers.SGD(1.0)),
        options=ctl.TrainerOptions(**options),
    )


def loss_and_gradients(weights, rows, weighted=True):
    """Computes the loss of a global batch and its gradients by hand.

    Args:
        weights: E, W, b, V, c as arrays.
        rows: the examples of the batch.
        weighted: whether to weight the examples by `weight`.

    Returns:
        The loss, the gradients in the order of `weights`, and the [rows] losses of the examples.
    """
    embedding, kernel, bias, kernel2, bias2 = weights
    count = len(rows["label"])
    weight = rows["weight"] if weighted else np.ones(count)
    inputs = np.concatenate([rows["x"], embedding[rows["token"]]], axis=1)
    hidden = np.tanh(inputs @ kernel + bias)
    logits = hidden @ kernel2 + bias2
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probability = shifted / shifted.sum(axis=1, keepdims=True)
    per_example = -np.log(probability[np.arange(count), rows["label"]])
    total = weight.sum()
    loss = (weight * per_example).sum() / total if total else 0.0
    d_logits = probability - np.eye(CLASSES)[rows["label"]]
    d_logits *= (weight / total if total else np.zeros(count))[:, np.newaxis]
    d_hidden = (d_logits @ kernel2.T) * (1 - hidden**2)
    d_inputs = d_hidden @ kernel.T
    d_embedding = np.zeros_like(embedding)
    np.add.at(d_embedding, rows["token"], d_inputs[:, FEATURES:])
    gradients = [
        d_embedding,
        inputs.T @ d_hidden + 2 * PENALTY * kernel,
        d_hidden.sum(axis=0),
        hidden.T @ d_logits,
        d_logits.sum(axis=0),
    ]
    return loss + PENALTY * (kernel**2).sum(), gradients, per_example


def pick(rows, indexes):
    """Selects the examples at `indexes`."""
    return {name: values[indexes] for name, values in rows.items()}
