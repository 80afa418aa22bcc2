"""Sharded slots: the bits of the unsharded update, checkpoints of any replicas, and rejections."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.optimizers.layerwise import LAMB
from ctl.parts import sharded_optimizer
from ctl.testing import tiny
from tests.support import reference_model

optimizers = tf_keras.optimizers
strategy = functools.cache(testing.make_strategy)

OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.9),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    # The first loss scale overflows until it has been halved many times.
    "overflowing": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=2.0**35
    ),
}


class Trainer(tiny.TinyTrainer):
    """Kernels of 280 and 2,310 elements: no multiples of 16, and biases of 70, 33 and 3."""

    def build_model(self):
        dense = tf_keras.layers.Dense
        first = dense(70, activation="tanh", input_shape=(tiny.FEATURES,), name="first")
        second = dense(33, activation="tanh", name="second")
        return tf_keras.Sequential([first, second, dense(tiny.CLASSES, name="head")])


class Embedded(tiny.TinyTrainer):
    """An embedding of 11 rows of 7, whose gradient is sparse and has rows several times.

    It has a step of its own, because `minimize` checks the slot variables.
    """

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        x, label = draw.integers(0, 11, (24, 5)), draw.integers(0, 3, 24)
        return ctl.data.arrays({"x": x, "label": label})

    def build_model(self):
        layers = tf_keras.layers
        embedding = layers.Embedding(11, 7, input_length=5, name="embedding")
        head = layers.Dense(tiny.CLASSES, name="head")
        return tf_keras.Sequential([embedding, layers.Flatten(), head])

    def replica_step(self, batch):
        def losses(rows):
            return self.per_example_loss(rows, self.forward(rows, training=True))

        return self.minimize(batch, losses)


def make(replicas, *, shard=True, cls=Trainer, optimizer=OPTIMIZERS["adam"], **options):
    where = strategy(replicas) if isinstance(replicas, int) else replicas
    options = {"batch": 7, "precision": "float32", "shard_state": shard, **options}
    return reference_model.make_trainer(where, cls=cls, optimizer=optimizer, **options)


def inner(trainer):
    return getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)


def weights(trainer):
    """The bytes of each variable, of which every replica's copy must have the same."""
    values = {}
    for variable in trainer.model.variables:
        first, *others = testing.copies(trainer.strategy, variable)
        assert all(copy.tobytes() == first.tobytes() for copy in others), variable.name
        values[variable.name] = first.tobytes()
    return values


def slots(trainer):
    """The bytes of each complete variable of the optimizer."""
    values = {}
    for variable in inner(trainer).variables:
        value = np.asarray(testing.copies(trainer.strategy, variable)[0])
        values[variable.name] = (tuple(variable.shape), value.dtype, value.tobytes())
    return values


def slot_bytes(trainer):
    """The bytes of the slot variables of one replica, and of all variables of the optimizer."""
    components = [
        trainer.strategy.experimental_local_results(v)[0] for v in inner(trainer)._variables
    ]
    slots = [v for v in components if v.shape.rank]
    held = sharded_optimizer.held_variables(inner(trainer))
    return tuple(sum(v.shape.num_elements() * v.dtype.size for v in each) for each in (slots, held))


def check_bits(replicas, steps, **arguments):
    """Trains with and without shard_state, and compares every bit; returns both trainers."""
    trainers = [make(replicas, shard=shard, **arguments) for shard in (False, True)]
    for trainer in trainers:
        trainer.train(tf.constant(steps))
    plain, sharded = trainers
    assert weights(plain) == weights(sharded)
    assert slots(plain) == slots(sharded)
    assert type(inner(sharded)) is not type(inner(plain))
    return plain, sharded


@functools.cache
def trained_pair():
    """Trainers without and with shard_state after 20 steps of Adam with the same bits."""
    return check_bits(2, 20, cls=Embedded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rmsprop", "ftrl"])
def test_weights_and_slots_have_the_bits_of_the_unsharded_update(name):
    check_bits(4, 20, optimizer=OPTIMIZERS[name])


def test_a_replica_has_the_bits_of_the_unsharded_update_and_holds_its_slice_of_the_slots_only():
    plain, sharded = trained_pair()
    # Of 77 elements, 4 vectors of 16 are split as 2 and 2, and every replica has the last 13.
    elements, complete = (2 * 16 + 13) + (3 * 16 + 9) + 3, 77 + 105 + 3
    # m and v in float32; the counter of updates, and the values of the slices.
    assert slot_bytes(sharded) == (2 * 4 * elements, 8 + 3 * 4 * elements)
    assert slot_bytes(plain) == (2 * 4 * complete, 8 + 2 * 4 * complete)


def test_slices_are_gathered_in_buckets_of_one_dtype():
    sizes = [(4, "float32"), (1, "float64"), (9, "float32"), (1, "float32"), (0, "float64")]
    slices = [tf.zeros([size * sharded_optimizer._BUCKET // 40], dtype) for size, dtype in sizes]
    assert sharded_optimizer._buckets(slices) == [[0, 2], [1, 4], [3]]


EVERYTHING = dict(
    micro_batches=2,
    clip=ctl.Clip(global_norm=0.1),
    ema_decay=0.9,
    weight_decay_exclude=["*/bias"],
    optimizer_groups=[
        dict(variables="second/kernel", learning_rate_scale=0.1),
        dict(variables="first/*", frozen=True),
    ],
)


@pytest.mark.slow
def test_other_options_have_the_bits_of_the_unsharded_update(monkeypatch):
    monkeypatch.setattr(sharded_optimizer, "_BUCKET", 40)  # several buckets: the kernels are larger
    options = dict(batch=10, on_non_finite="skip", **EVERYTHING)
    check_bits(2, 6, optimizer=OPTIMIZERS["momentum"], **options)


@pytest.mark.slow
def test_overflowing_steps_of_float16_are_skipped_and_keep_slices_and_weights():
    plain, sharded = check_bits(2, 30, optimizer=OPTIMIZERS["overflowing"], precision="float16")
    skipped = int(sharded.skipped_steps.numpy())
    assert 5 < skipped < 25 and skipped == int(plain.skipped_steps.numpy())
    assert int(inner(sharded).iterations.numpy()) == 30 - skipped


@pytest.mark.parametrize(
    ("saved", "replicas", "shard"),
    [(2, 1, False), (2, 4, True), pytest.param(1, 4, True, marks=pytest.mark.slow)],
)
def test_a_checkpoint_restores_onto_any_replicas_sharded_or_not(tmp_path, saved, replicas, shard):
    first = trained_pair()[1] if saved == 2 else make(1, cls=Embedded)
    first.train(tf.constant(1))
    other = make(replicas, shard=shard, cls=Embedded)
    Checkpointer(tmp_path, first).save()
    checkpoints = Checkpointer(tmp_path, other)
    assert checkpoints.all_restore_latest()
    assert checkpoints.unmatched is None
    assert weights(other) == weights(first)
    assert slots(other) == slots(first)
    assert any(any(value) for _, _, value in slots(other).values())


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: LAMB(), "LAMB"),
        (type("Mine", (optimizers.Adam,), {}), "Mine"),
        (lambda: optimizers.Adam(clipnorm=1.0), "set optimizer.clip.norm"),
        (lambda: optimizers.Adam(use_ema=True), "set optimizer.ema_decay"),
    ],
)
def test_optimizers_that_read_complete_variables_are_rejected(optimizer, message):
    with pytest.raises(UsageError, match=message) as error:
        make(2, optimizer=optimizer)
    assert "\n" not in str(error.value) and "shard_state" in str(error.value)


def test_sparse_gradients_are_rejected_if_their_bits_depend_on_positions():
    with pytest.raises(UsageError, match=r"cannot keep the bits of .*sparse gradients"):
        make(2, cls=Embedded, optimizer=OPTIMIZERS["rmsprop"]).train(tf.constant(1))


def test_central_storage_is_rejected():
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with pytest.raises(UsageError, match="shard_state splits the slot variables"):
        make(central)


def train_in_two_processes(folder):
    """Trains 50 steps on 2 workers without and with shard_state; returns the bytes."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return [train_and_resume(strategy, f"{folder}/{shard}", shard) for shard in (False, True)]


def train_and_resume(strategy, folder, shard):
    trainer = make(strategy, shard=shard)
    trainer.train(tf.constant(50))
    result = weights(trainer), slots(trainer), slot_bytes(trainer)
    is_chief = strategy.cluster_resolver.task_id == 0
    Checkpointer(folder, trainer, is_chief=is_chief).save()
    if shard:
        resumed = make(strategy, shard=shard)
        # A reduction waits for the chief, whose files are then complete.
        strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
        Checkpointer(folder, resumed, is_chief=is_chief).all_restore_latest()
        for each in (trainer, resumed):
            each.train(tf.constant(2))
        assert (weights(resumed), slots(resumed)) == (weights(trainer), slots(trainer))
    return result


@pytest.mark.slow
def test_two_processes_have_the_bits_of_the_unsharded_update(tmp_path):
    (plain, first), (_, second) = testing.run_workers(train_in_two_processes, str(tmp_path))
    assert first[:2] == second[:2] == plain[:2]
    assert first[2][0] < 0.55 * plain[2][0]
    # A checkpoint of two processes restores onto four replicas of one.
    trainer = make(4)
    Checkpointer(tmp_path / "True", trainer).all_restore_latest()
    assert (weights(trainer), slots(trainer)) == first[:2]
