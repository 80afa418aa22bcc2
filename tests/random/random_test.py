"""Random numbers of users' own code are the same on every split, or the step is rejected."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src.engine.base_layer import BaseRandomLayer

import ctl
from ctl import testing

layers = tf_keras.layers
TIME, FEATURES, EXAMPLES = 3, 4, 21
ROWS = 5


@functools.cache
def examples():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(EXAMPLES, TIME, FEATURES)),
        "label": rng.normal(size=(EXAMPLES, 2)),
    }


class Trainer(ctl.StandardTrainer):
    """Regression on [rows, time, features]; subclasses draw random numbers somewhere."""

    def build_model(self):
        return tf_keras.Sequential([layers.Flatten(), layers.Dense(2)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(examples())

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(tf.square(outputs - batch["label"]), axis=-1)


class DynamicRows:
    """Mixin: batches whose number of rows is known only when the step runs; the fifth has 1."""

    def build_dataset(self, split, input_context):
        data = tf.data.Dataset.from_tensor_slices(examples()).batch(ROWS)
        return ctl.data.GlobalBatches(data)


def make(cls, replicas=1, micro_batches=1, batch=ROWS, **options):
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
        options=ctl.TrainerOptions(precision="float64", micro_batches=micro_batches, **options),
    )


def weights(trainer, steps=3):
    trainer.train(tf.constant(steps))
    return np.concatenate([w.ravel() for w in trainer.model.get_weights()])


@functools.cache
def on_one_replica(cls):
    return weights(make(cls))


# Public draws.


class Noise(layers.Layer):
    """A layer that a user wrote: noise of the shape of its inputs."""

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + ctl.random.normal(tf.shape(inputs), stddev=0.5, dtype=inputs.dtype)


class Drawing(Trainer):
    """Draws in `preprocess`, in layers and in the loss."""

    def build_model(self):
        return tf_keras.Sequential([Noise(), layers.Flatten(), Noise(), layers.Dense(2)])

    def preprocess(self, batch):
        level = ctl.random.uniform([None, 1, 1], maxval=0.5, dtype=tf.float64)
        noise = ctl.random.normal(tf.shape(batch["x"]), dtype=tf.float64, name="noise")
        keep = ctl.random.bernoulli(tf.shape(batch["label"]), 0.8, tf.float64)
        return {**batch, "x": batch["x"] + level * noise, "label": batch["label"] * keep}

    def per_example_loss(self, batch, outputs):
        flip = ctl.random.integers([None], 0, 3)
        scale = ctl.random.beta([], 0.4, 0.4, shared=True, dtype=tf.float64)
        outputs = ctl.random.dropout(outputs, 0.3)
        weight = tf.cast(flip, tf.float64) + scale
        return weight * super().per_example_loss(batch, outputs)


class Mixed(Trainer):
    """Pairs of rows: draws per row, and a permutation of the global batch."""

    def replica_step(self, batch):
        x, label = ctl.random.mixup(batch["x"], batch["label"], 0.4)
        x, label = ctl.random.cutmix(x[..., None], label)
        return super().replica_step({**batch, "x": x[..., 0], "label": label})


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Drawing, Mixed])
def test_public_draws_are_the_same_on_every_split(cls):
    actual = weights(make(cls, replicas=2, micro_batches=2))  # 3 and 2 rows
    np.testing.assert_allclose(actual, on_one_replica(cls), rtol=0, atol=1e-12)
    assert not np.allclose(on_one_replica(cls), on_one_replica(Trainer))


@pytest.mark.slow
def test_public_draws_are_the_same_for_a_number_of_rows_that_is_not_static():
    class Dynamic(DynamicRows, Mixed):
        pass

    # Shares of 3 and 2 rows, and of 1 and 0 in step 5.
    split, one = weights(make(Dynamic, 2), 5), weights(make(Dynamic), 5)
    np.testing.assert_allclose(split, one, rtol=0, atol=1e-12)


class Noisy(Trainer):
    def build_dataset(self, split, input_context):  # no seed orders its data
        return tf.data.Dataset.from_tensor_slices(examples())

    def per_example_loss(self, batch, outputs):
        noise = ctl.random.normal(tf.shape(outputs), dtype=tf.float64)
        return super().per_example_loss(batch, outputs + noise)


def test_public_draws_depend_on_the_seed_of_the_trainer():
    one, other = make(Noisy), make(Noisy, seed=1)
    other.model.set_weights(one.model.get_weights())
    assert not np.allclose(weights(one, 1), weights(other, 1))


@pytest.mark.slow
def test_public_draws_are_the_same_under_xla():
    compiled = weights(make(Drawing, xla="loop"))
    np.testing.assert_allclose(compiled, on_one_replica(Drawing), rtol=0, atol=1e-6)


class Variational(Trainer):
    """Draws in evaluation too."""

    def forward(self, batch, training):
        latent = ctl.random.normal([None, TIME, FEATURES], dtype=tf.float64)
        return self.model(batch["x"] + latent, training=training)


def test_evaluation_draws_by_the_position_of_the_row_in_the_data():
    def evaluate(replicas, batch, step):
        trainer = make(Variational, replicas, batch=batch)
        trainer.global_step.assign(step)
        evaluator = ctl.StandardEvaluator(trainer)
        first, second = (float(evaluator.evaluate(tf.constant(-1))["loss"]) for _ in range(2))
        assert first == second
        return first

    assert evaluate(2, 4, step=1) == pytest.approx(evaluate(1, EXAMPLES, step=0), abs=1e-12)


class Unkeyed(Trainer):
    def per_example_loss(self, batch, outputs):
        noise = tf.random.normal(tf.shape(outputs), dtype=outputs.dtype)
        return super().per_example_loss(batch, outputs + noise)


class Shift(BaseRandomLayer):
    """Draws once for the rows of its replica."""

    def call(self, x):
        seed = self._random_generator.make_seed_for_stateless_op()
        return x + tf.random.stateless_uniform([], seed, dtype=x.dtype)


class Shifted(Trainer):
    def build_model(self):
        self.shift = Shift(force_generator=True, name="shift")
        return super().build_model()

    def preprocess(self, batch):
        return {**batch, "x": self.shift(batch["x"])}


def test_unkeyed_random_numbers_are_rejected_in_training_and_evaluation():
    line = Unkeyed.per_example_loss.__code__.co_firstlineno + 1
    trainer = make(Unkeyed)
    for run in (trainer.train, ctl.StandardEvaluator(trainer).evaluate):
        with pytest.raises(ctl.UsageError, match=r"ctl\.random\.normal") as caught:
            run(tf.constant(1))
        message = str(caught.value)
        assert message.startswith(f"tests/random/random_test.py:{line} ") and "\n" not in message


def test_layer_that_draws_for_its_batch_in_preprocess_is_rejected_when_the_trainer_is_built():
    with pytest.raises(ctl.UsageError, match=r"shift.* draws .*do it in the input pipeline"):
        make(Shifted)


def test_allow_unkeyed_random_accepts_all_of_them():
    class Both(Unkeyed, Shifted):
        pass

    trainer = make(Both, allow_unkeyed_random=True)
    trainer.train(tf.constant(1))
    ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))


def test_mixup_and_cutmix_are_the_layers_of_keras_with_the_same_draws(monkeypatch):
    random = np.random.default_rng(0)
    images, labels = random.normal(size=(4, 5, 6, 2)).astype("f4"), np.eye(4, dtype="f4")
    ratio, places = random.uniform(size=4).astype("f4"), random.uniform(size=(2, 4)).astype("f4")
    partners = [2, 0, 3, 1]
    monkeypatch.setattr(ctl.random, "beta", lambda *_, **__: tf.constant(ratio))
    monkeypatch.setattr(ctl.random, "permutation_of_batch", lambda **_: tf.constant(partners))
    draws = list(places)
    monkeypatch.setattr(ctl.random, "uniform", lambda *_, **__: tf.constant(draws.pop(0)))
    mixed = {name: getattr(ctl.random, name)(images, labels) for name in ("mixup", "cutmix")}
    scope = keras.src.backend.random
    monkeypatch.setattr(scope, "beta", lambda *_, **__: ratio)
    monkeypatch.setattr(scope, "shuffle", lambda *_, **__: np.array(partners))
    columns = list(places[::-1])  # Keras draws the place on axis 2 first
    monkeypatch.setattr(
        keras.layers.CutMix,
        "_compute_crop_bounds",
        lambda self, rows, size, side, seed: (
            start := columns.pop(0) * (size - side * size),
            start + side * size,
        ),
    )
    for name, layer in (("mixup", keras.layers.MixUp()), ("cutmix", keras.layers.CutMix())):
        expected = layer({"images": images, "labels": labels}, training=True)
        np.testing.assert_allclose(mixed[name][0], expected["images"], atol=1e-6)
        np.testing.assert_allclose(mixed[name][1], expected["labels"], atol=1e-6)
    with pytest.raises(ctl.UsageError, match=r"mixup got int64"):
        ctl.random.mixup(images, np.arange(4))


def test_draws_outside_of_a_step_are_functions_of_their_arguments():
    first = ctl.random.normal([3, 2], name="a")
    assert np.array_equal(first, ctl.random.normal([3, 2], name="a"))
    assert not np.array_equal(first, ctl.random.normal([3, 2], name="b"))
    assert not np.array_equal(first, ctl.random.normal([3, 2], name="a", seed=1))
    assert np.array_equal(first[:2], ctl.random.normal([2, 2], name="a"))
    with pytest.raises(ctl.UsageError, match="None in the shape"):
        ctl.random.normal([None, 2])
    with pytest.raises(ctl.UsageError, match="call it in one"):
        ctl.random.permutation_of_batch()


def test_draws_have_the_documented_distributions():
    count = 40_000
    unit = ctl.random.uniform([count], -1.0, 3.0).numpy()
    assert unit.min() >= -1 and unit.max() < 3 and unit.mean() == pytest.approx(1.0, abs=0.02)
    normal = ctl.random.normal([count], 2.0, 3.0).numpy()
    assert (normal.mean(), normal.std()) == (pytest.approx(2, abs=0.06), pytest.approx(3, abs=0.05))
    cut = ctl.random.truncated_normal([count]).numpy()
    assert np.abs(cut).max() <= 2 and cut.std() == pytest.approx(0.8796, abs=0.01)
    assert ctl.random.bernoulli([count], 0.3, tf.float32).numpy().mean() == pytest.approx(
        0.3, abs=0.01
    )
    counts = np.bincount(ctl.random.integers([count], 2, 7).numpy(), minlength=7)
    assert counts[:2].sum() == 0 and np.abs(counts[2:] / count - 0.2).max() < 0.01
    assert ctl.random.gumbel([count]).numpy().mean() == pytest.approx(0.5772, abs=0.03)
    logits = tf.tile(tf.math.log([[0.1, 0.2, 0.7]]), [count, 1])
    shares = np.bincount(ctl.random.categorical(logits).numpy()) / count
    assert np.abs(shares - [0.1, 0.2, 0.7]).max() < 0.01
    many = tf.zeros([1000, 100])  # in 16 bits many of the largest sums would be equal
    classes = ctl.random.categorical(many)
    np.testing.assert_array_equal(ctl.random.categorical(tf.cast(many, tf.bfloat16)), classes)
    for a, b in ((0.2, 0.2), (2.0, 5.0)):
        ratio = ctl.random.beta([count], a, b).numpy()
        variance = a * b / ((a + b) ** 2 * (a + b + 1))
        assert ratio.mean() == pytest.approx(a / (a + b), abs=0.01)
        assert ratio.var() == pytest.approx(variance, rel=0.05)
    half = ctl.random.uniform([count], dtype=tf.bfloat16)
    assert float(tf.reduce_max(tf.cast(half, tf.float32))) < 1


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: ctl.random.uniform([2], dtype=tf.int32), "requires floats"),
        (lambda: ctl.random.integers([2], 0, 2, tf.float32), "requires integers"),
        (lambda: ctl.random.integers([2], 3, 3), "1 to 2"),
        (lambda: ctl.random.beta([2], 0.0, 1.0), "greater than 0"),
    ],
)
def test_wrong_arguments_are_rejected(draw, message):
    with pytest.raises(ctl.UsageError, match=message):
        draw()
