"""Random augmentation: a function of (seed, epoch, example), on any replicas, after any restart."""

import functools
import itertools
import random

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.data import sampler
from ctl.data.input_pipeline import InputPipeline
from ctl.data.kinds import kind_of
from ctl.data.layout import Layout
from tests.data.reading import check_data, one_line, read_steps
from tests.support import reference_model

COUNT, SEED = 11, 3


def noisy(example, seed):
    """Adds random numbers; changes dtypes and shapes, as a crop does."""
    noise = tf.random.stateless_uniform([2], seed, dtype=tf.float64)
    return {"id": example["id"], "noise": noise, "seed": seed}


def source():
    return ctl.data.arrays({"id": np.arange(COUNT)})


def dataset():
    return tf.data.Dataset.range(COUNT).map(lambda i: {"id": i})


@functools.cache
def read(make, batch, *, replicas=1, start=0, steps=8, seed=SEED):
    """The id and the noise of each row of the stream in their order, without padding."""
    layout = Layout(batch, replicas)
    data = ctl.data.augmented(make(), noisy)
    check_data(data, "train")
    stream = kind_of(data).training(layout, seed=seed, start=start)
    rows = []
    for batch, mask in itertools.chain(*read_steps([stream], layout, steps)):
        real = ... if mask is None else mask == 1
        rows += zip(
            batch["id"][real].numpy(), map(tuple, batch["noise"][real].numpy()), strict=True
        )
    return rows


@pytest.mark.parametrize(("make", "batch", "replicas"), [(source, 5, 4), (dataset, 4, 2)])
def test_augmentation_is_the_same_on_any_replicas_and_from_any_step(make, batch, replicas):
    rows = read(make, 4)
    assert len(rows) == 32
    resumed = read(make, batch, replicas=replicas, start=2, steps=4)
    assert resumed == rows[2 * batch : 6 * batch]
    # Examples, epochs and seeds have their own noise.
    noises = {noise for _, noise in rows}
    assert len(noises | {noise for _, noise in read(make, 4, seed=SEED + 1)}) == 64


def test_seed_is_a_function_of_seed_epoch_and_example():
    positions = tf.range(3 * COUNT, dtype=tf.int64)
    order = sampler.example_indexes(positions, count=COUNT, seed=SEED, span=3 * COUNT)
    seeds = sampler.augmentation_seeds(
        positions, order, count=COUNT, seed=SEED, span=3 * COUNT
    ).numpy()
    assert seeds[:, 1].tolist() == order.numpy().tolist()
    by_epoch = seeds[:, 0].reshape(3, COUNT)
    assert (by_epoch == by_epoch[:, :1]).all()
    assert len(set(by_epoch[:, 0])) == 3
    noises = [tf.random.stateless_uniform([2], s, dtype=tf.float64).numpy() for s in seeds[:32]]
    assert read(source, 4) == [(s[1], tuple(n)) for s, n in zip(seeds, noises, strict=False)]


class Jittered(reference_model.ReferenceTrainer):
    """ReferenceTrainer with random noise added to its inputs."""

    def build_dataset(self, split, input_context):
        def jitter(example, seed):
            noise = tf.random.stateless_normal([reference_model.FEATURES], seed, dtype=tf.float64)
            return {**example, "x": example["x"] + noise}

        return ctl.data.augmented(ctl.data.arrays(reference_model.examples()), jitter)


@pytest.mark.slow
def test_augmented_training_has_the_same_weights_on_replicas_and_in_a_compiled_loop():
    def train(replicas, **options):
        strategy = testing.make_strategy(replicas)
        trainer = reference_model.make_trainer(
            strategy, 7, cls=Jittered, optimizer=lambda: tf_keras.optimizers.SGD(0.1), **options
        )
        trainer.train(tf.constant(50))
        return [testing.copies(strategy, variable) for variable in trainer.model.variables]

    expected = train(1)
    for trained in (train(2), train(1, xla="loop")):
        for (a,), copies in zip(expected, trained, strict=True):
            for copy in copies:
                np.testing.assert_allclose(copy, a, rtol=0, atol=1e-10)


def test_stateful_random_ops_are_rejected():
    def with_branch(example, seed):
        if seed[0] > 0:
            return {"id": example["id"], "noise": tf.random.uniform([2])}
        return {"id": example["id"], "noise": tf.zeros([2])}

    generator = tf.random.Generator.from_seed(1)
    with_generator = lambda example, seed: {"noise": generator.normal([2])}  # noqa: E731
    for augment, op in ((with_branch, "RandomUniform"), (with_generator, "RngReadAndSkip")):
        message = one_line(check_data, ctl.data.augmented(source(), augment), "train")
        assert f"uses {op}" in message and "stateless" in message


GENERATOR = np.random.default_rng(0)


def test_numbers_of_the_host_are_rejected_with_the_line_of_the_function():
    def shift(example, seed):
        return {"id": example["id"] + np.random.randint(9)}

    def jitter_by_name(example, seed):
        return {"id": example["id"] + GENERATOR.integers(9)}

    for augment, name in ((shift, "numpy.random"), (jitter_by_name, "GENERATOR")):
        message = one_line(check_data, ctl.data.augmented(source(), augment), "train")
        line = augment.__code__.co_firstlineno
        assert f"tests/data/augmentation_test.py:{line}: {augment.__name__} draws" in message
        assert f"from {name}, which happens once, while tf.data traces it" in message


def test_numbers_of_the_host_are_rejected_in_a_map_of_build_dataset():
    def build_dataset(split, context):
        first = random.randrange(9)  # once for the data set
        data = tf.data.Dataset.range(first, first + COUNT)
        return data.map(lambda i: {"id": i, "noise": tf.constant(random.random())})

    strategy = testing.make_strategy(1)
    pipeline = InputPipeline(build_dataset, strategy=strategy, seed=SEED, prefetch=1)
    message = one_line(pipeline.data, "train")
    assert "<lambda> draws from Python's random" in message
    build_dataset("train", None)  # of the user's own code, which ctl does not check


def test_data_that_cannot_be_augmented_is_rejected():
    batches = ctl.data.GlobalBatches(dataset().batch(2))
    assert "requires a ctl.data.Source or" in one_line(ctl.data.augmented, batches, noisy)
    message = one_line(check_data, ctl.data.augmented(source(), noisy), "eval")
    assert "'eval', ...) returned augmented examples" in message
    data = ctl.data.augmented(source(), lambda example, seed: example["id"])
    assert "must be dicts" in one_line(check_data, data, "train")
    options = dict(cls=Jittered, xla="loop", placement="device")
    message = one_line(reference_model.make_trainer, testing.make_strategy(1), 8, **options)
    assert "bypasses the input pipeline that augments" in message
