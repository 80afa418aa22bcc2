"""Random augmentation: a function of (seed, epoch, example), on any hardware, after any restart."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.data import batching, distribution, sampler
from ctl.data.layout import Layout
from tests import tiny

COUNT, SEED = 11, 3


def noisy(example, seed):
    """Adds a number of the seed's own; changes dtype and shape, as a crop does."""
    noise = tf.random.stateless_uniform([2], seed, dtype=tf.float64)
    return {"id": example["id"], "noise": noise, "seed": seed}


def source():
    return ctl.data.arrays({"id": np.arange(COUNT)})


def dataset():
    return tf.data.Dataset.range(COUNT).map(lambda i: {"id": i})


def stream(make, batch, *, replicas=1, start=0, steps=8, seed=SEED, augment=noisy):
    """id -> the noise of each time that it is seen, and the ids in their order, padding left out."""
    layout = Layout(batch, replicas)
    data = ctl.data.augmented(make(), augment)
    batching.check_data(data, "train")
    elements = distribution.disable_autotune(
        batching.training(data, layout, seed=seed, start=start, prefetch=2)
    )
    ids, noises = [], []
    for element, present in itertools.islice(elements, steps * replicas):
        there = np.ones(layout.rows) if present is None else present.numpy()
        ids += element["id"].numpy()[there == 1].tolist()
        noises += element["noise"].numpy()[there == 1].tolist()
    return ids, noises


@pytest.mark.parametrize("make", [source, dataset])
@pytest.mark.parametrize(("batch", "replicas"), [(4, 1), (4, 2), (4, 4), (5, 2), (3, 4)])
def test_an_example_looks_the_same_on_any_replicas_and_from_any_step(make, batch, replicas):
    whole = stream(make, batch, steps=8)
    assert stream(make, batch, replicas=replicas, steps=8) == whole
    ids, noises = stream(make, batch, replicas=replicas, start=3, steps=5)
    assert (ids, noises) == (whole[0][3 * batch :], whole[1][3 * batch :])


def test_the_seed_is_that_of_seed_epoch_and_example():
    positions = tf.range(3 * COUNT, dtype=tf.int64)
    order = sampler.shuffled(positions, count=COUNT, seed=SEED, span=3 * COUNT)
    seeds = sampler.seeds(positions, order, count=COUNT, seed=SEED, span=3 * COUNT).numpy()
    assert seeds[:, 1].tolist() == order.numpy().tolist()
    by_epoch = seeds[:, 0].reshape(3, COUNT)
    assert (by_epoch == by_epoch[:, :1]).all()
    assert len(set(by_epoch[:, 0])) == 3
    ids, noises = stream(source, 4)
    want = [tf.random.stateless_uniform([2], s, dtype=tf.float64).numpy() for s in seeds[:32]]
    assert ids == order.numpy()[:32].tolist()
    np.testing.assert_array_equal(noises, want)


@pytest.mark.parametrize("make", [source, dataset])
def test_examples_epochs_and_seeds_look_different(make):
    _, noises = stream(make, 4)
    assert len(set(map(tuple, noises))) == len(noises) == 32
    assert not set(map(tuple, stream(make, 4, seed=SEED + 1)[1])) & set(map(tuple, noises))


def test_batches_of_another_size_have_the_same_examples():
    assert stream(source, 8, steps=4) == stream(source, 4, steps=8)


class Jittered(tiny.TinyTrainer):
    """TinyTrainer whose inputs are moved by noise of their own."""

    def build_dataset(self, split, input_context):
        data = ctl.data.arrays(tiny.examples())
        if split != "train":
            return data

        def jitter(example, seed):
            noise = tf.random.stateless_normal([tiny.FEATURES], seed, dtype=tf.float64)
            return {**example, "x": example["x"] + noise}

        return ctl.data.augmented(data, jitter)


@pytest.mark.parametrize(
    ("replicas", "batch", "xla"), [(4, 8, "off"), (2, 7, "off"), (1, 7, "loop")]
)
def test_training_is_the_same_however_it_is_run(strategy, replicas, batch, xla):
    def trained(replicas, **options):
        trainer = tiny.trainer(
            strategy(replicas), batch, cls=Jittered,
            optimizer=lambda: tf_keras.optimizers.SGD(0.1), **options,
        )  # fmt: skip
        trainer.train(tf.constant(50))
        return trainer

    one, other = trained(1), trained(replicas, xla=xla)
    for a, b in zip(one.model.variables, other.model.variables, strict=True):
        for copy in testing.copies(strategy(replicas), b):
            np.testing.assert_allclose(copy, a.numpy(), rtol=0, atol=1e-10)


def test_random_numbers_of_other_means_are_refused():
    def sneaky(example, seed):
        if seed[0] > 0:
            return {"id": example["id"], "noise": tf.random.uniform([2])}
        return {"id": example["id"], "noise": tf.zeros([2])}

    generator = tf.random.Generator.from_seed(1)

    def drawing(example, seed):
        return {"id": example["id"], "noise": generator.normal([2])}

    for augment, op in ((sneaky, "RandomUniform"), (drawing, "RngReadAndSkip")):
        data = ctl.data.augmented(source(), augment)
        with pytest.raises(ctl.UsageError, match=f"draws by {op}.*stateless"):
            batching.check_data(data, "train")


def test_what_cannot_be_augmented_is_refused(strategy):
    with pytest.raises(ctl.UsageError, match=r"want a ctl\.data.Source or"):
        ctl.data.augmented(ctl.data.GlobalBatches(dataset().batch(2)), noisy)
    with pytest.raises(ctl.UsageError, match=r"'eval'.* returned augmented examples"):
        batching.check_data(ctl.data.augmented(source(), noisy), "eval")
    with pytest.raises(ctl.UsageError, match="want dicts"):
        batching.check_data(
            ctl.data.augmented(source(), lambda example, seed: example["id"]), "train"
        )
    with pytest.raises(ctl.UsageError, match="past the input pipeline that augments"):
        tiny.trainer(strategy(1), 8, cls=Jittered, xla="loop", placement="device")
