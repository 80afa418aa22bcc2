"""A model of Keras 3 is trained like its twin in tf_keras, however the batch is split."""

import pytest
import tf_keras

from tests.replica.keras3 import twins
from tests.replica.keras3.twins import difference, keras, make_trainer, train

SYNC = {"sync_batch_norm": True}


def transformer(k):
    inputs = k.Input((5, 6))
    x = k.layers.MultiHeadAttention(2, 3, dropout=0.2)(inputs, inputs)
    x = k.layers.LayerNormalization()(k.layers.Add()([inputs, x]))
    return k.Model(inputs, k.layers.Dense(4)(k.layers.GlobalAveragePooling1D()(x)))


def recurrent(k):
    return k.Sequential(
        [
            k.Input((5, 6)),
            k.layers.SpatialDropout1D(0.3),
            k.layers.GRU(4, dropout=0.2, recurrent_dropout=0.1, return_sequences=True),
            k.layers.BatchNormalization(),
            k.layers.LSTM(4, dropout=0.2),
            k.layers.GaussianNoise(0.1),
            k.layers.Dense(4),
        ]
    )


def embedding(k):
    return k.Sequential(
        [k.Input((6,)), k.layers.Embedding(9, 4), k.layers.Flatten(), k.layers.Dense(4)]
    )


def subclassed(k):
    class Model(k.Model):
        def __init__(self):
            super().__init__()
            self.hidden = k.layers.Dense(5, activation="tanh")
            self.norm = k.layers.BatchNormalization()
            self.drop = k.layers.Dropout(0.3)
            self.last = k.layers.Dense(4)

        def call(self, inputs, training=False):
            hidden = self.norm(self.hidden(inputs), training=training)
            return self.last(self.drop(hidden, training=training))

    return Model()


class Tokens(twins.Twin):
    shape = (6,)

    def preprocess(self, batch):
        return {**batch, "x": twins.tf.cast(batch["x"], twins.tf.int32) % 9}


def of_shape(*shape):
    return type("Shaped", (twins.Twin,), {"shape": shape})


# The definitions of attention and recurrent layers differ in where they draw.
MODELS = {
    "convolutional": (twins.convolutional, twins.Twin, SYNC, True),
    "transformer": (transformer, of_shape(5, 6), {}, False),
    "recurrent": (recurrent, of_shape(5, 6), SYNC, False),
    "embedding": (embedding, Tokens, {}, True),
    "subclassed": (subclassed, of_shape(6), SYNC, True),
}


def test_uneven_replicas_train_the_same_weights_as_one_device_and_tf_keras():
    results = [
        train(make_trainer(package, replicas=replicas, model=SYNC, seed=3))
        for package, replicas in ((keras, 2), (tf_keras, 1))
    ]
    (one, weights), (two, other) = results
    assert difference(weights, other) < 1e-10
    assert one.keys() == two.keys() and abs(one["loss"] - two["loss"]) < 1e-10


@pytest.mark.slow
def test_plain_batch_normalization_uses_the_rows_of_each_replica_as_in_tf_keras(caplog):
    runs = [make_trainer(package, replicas=2, batch=8, seed=3) for package in (keras, tf_keras)]
    assert caplog.text.count("Batch normalization of a part of the batch") == 2
    for trainer in runs:
        train(trainer)
    # The moving variance of tf_keras has Bessel's correction.
    assert difference(*[[v.numpy() for v in t.model.trainable_weights] for t in runs]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_update_is_a_function_of_the_global_batch(name):
    make, cls, model, equal = MODELS[name]

    def run(package=keras, **options):
        trainer = make_trainer(package, cls=cls, make=make, model=model, seed=3, **options)
        return train(trainer, 50)[1]

    for batch, replicas in ((7, (2,)), (5, (4,)), (8, (2, 4))):
        expected = run(batch=batch)
        for count in replicas:
            assert difference(run(batch=batch, replicas=count), expected) < 1e-10
        if equal:
            assert difference(run(tf_keras, batch=batch), expected) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 3}, {"shard_state": True}, {"xla": "gradients"},
     {"ema_decay": 0.9}, {"clip": twins.ctl.Clip(global_norm=0.1)}, {"logical_shards": 2}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_compute_the_update_of_one_device(options):
    run = lambda **o: train(  # noqa: E731
        make_trainer(cls=of_shape(5, 6), make=transformer, batch=8, seed=3, **o)
    )[1]
    assert difference(run(replicas=2, **options), run(**options)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precisions_compute_the_same_as_in_tf_keras(precision):
    both = [
        train(make_trainer(k, replicas=2, batch=8, model=SYNC, seed=3, precision=precision))[1]
        for k in (keras, tf_keras)
    ]
    assert difference(*both) == 0


@pytest.mark.slow
@pytest.mark.parametrize("xla", ["step", "loop"])
def test_compiled_steps_compute_the_same(xla):
    runs = [train(make_trainer(batch=8, model=SYNC, seed=3, xla=mode))[1] for mode in (xla, "off")]
    assert difference(*runs) < 1e-10
