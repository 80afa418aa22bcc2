"""`optimizer.groups` with optimizers: one update of several, compared with a loop written by hand."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.testing import tiny
from tests.support import reference_model
from tests.support.checks import one_line

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(20, 4)), 3 * DRAW.normal(size=(20, 2))
STEPS = 8
POISONED = 3  # the step whose loss is not a number
RATES = tf_keras.optimizers.schedules.PiecewiseConstantDecay


def build(classes=2):
    tf_keras.utils.set_random_seed(0)
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [layers.Dense(5, activation="tanh", name="trunk"), layers.Dense(classes, name="head")]
    )


def trunk():
    return tf_keras.optimizers.SGD(RATES([2, 5], [0.1, 0.05, 0.02]), momentum=0.9)


def head():
    return tf_keras.optimizers.AdamW(RATES([1, 4], [0.05, 0.03, 0.01]), weight_decay=0.1)


def batches(rows, strategy=None, start=0):
    source = ctl.data.arrays({"x": X, "label": Y})
    return ctl.data.distribute(source, rows, strategy, start_step=start)


@functools.cache
def reference(rows):
    """The weights after a loop on one device, which leaves out the poisoned step."""
    tf_keras.backend.set_floatx("float64")
    model, optimizers = build(), (trunk(), head())
    for i, element in enumerate(itertools.islice(batches(rows), STEPS)):
        with tf.GradientTape() as tape:
            errors = element.batch["label"] - model(element.batch["x"])
            loss = tf.reduce_mean(tf.reduce_sum(errors**2, -1))
        variables = model.trainable_variables
        clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        pairs = list(zip(clipped, variables, strict=True))
        if i != POISONED:
            for optimizer, own in zip(optimizers, (pairs[:2], pairs[2:]), strict=True):
                optimizer.apply_gradients(own)
    tf_keras.backend.set_floatx("float32")
    return np.concatenate([w.ravel() for w in model.get_weights()])


def make_step(replicas, rows, optimizer=head, **options):
    def loss_fn(batch, outputs):
        factor = tf.where(step.global_step.read_value() == POISONED, np.nan, 1.0)
        return tf.reduce_sum((batch["label"] - outputs) ** 2, -1) * tf.cast(factor, tf.float64)

    step = ctl.Step(
        build, trunk, loss_fn, global_batch_size=rows, strategy=testing.make_strategy(replicas),
        precision="float64", clip=ctl.Clip(global_norm=1.0),
        optimizer_groups=[dict(variables="head/*", optimizer=optimizer)], **options,
    )  # fmt: skip
    return step


def train(step, rows, end):
    first = int(step.global_step.numpy())
    for batch in itertools.islice(batches(rows, step.strategy, first), end - first):
        step(batch)


def weights(step):
    return np.concatenate([w.ravel() for w in step.model.get_weights()])


@pytest.mark.parametrize(
    ("replicas", "rows", "options"),
    [
        (2, 8, {"norms": "global", "ema_decay": 0.9}),
        pytest.param(4, 5, {"shard_state": True}, marks=pytest.mark.slow),
        pytest.param(4, 5, {"shard_state": "gradients"}, marks=pytest.mark.slow),
    ],
)
def test_groups_have_one_update_with_a_joint_clip_schedules_and_skipped_steps(
    replicas, rows, options
):
    step = make_step(replicas, rows, **options)
    train(step, rows, STEPS)
    np.testing.assert_allclose(weights(step), reference(rows), rtol=0, atol=1e-12)
    assert int(step.skipped_steps.numpy()) == 1
    (other,) = step.optimizer._ctl_groups
    assert [int(o.iterations.numpy()) for o in (step.optimizer, other)] == [STEPS - 1] * 2


@pytest.mark.slow
def test_groups_resume_on_other_replicas_with_sharded_slots(tmp_path):
    step = make_step(2, 5, shard_state=True)
    train(step, 5, 5)
    ctl.Checkpointer(tmp_path, step).save()
    resumed = make_step(1, 5)
    resumed.build(next(iter(batches(5, resumed.strategy))))
    ctl.Checkpointer(tmp_path, resumed).all_restore_latest()
    train(resumed, 5, STEPS)
    np.testing.assert_allclose(weights(resumed), reference(5), rtol=0, atol=1e-12)


class Trainer(tiny.TinyTrainer):
    def build_model(self):
        return build(classes=3)


def make_trainer(*groups, **options):
    options = {"cls": Trainer, "optimizer": trunk, "optimizer_groups": groups, **options}
    return reference_model.make_trainer(testing.make_strategy(1), 8, **options)


def test_optimizer_without_gradients_counts_the_updates_too():
    """Its schedule proceeds while the layers of its group are frozen, or have no optimizer."""
    own = dict(variables="head/*", optimizer=head, frozen_until=2)
    other = dict(variables="trunk/*", optimizer=tf_keras.optimizers.Adagrad)
    trainer = make_trainer(own, other)
    trainer.train(tf.constant(3))
    optimizers = [trainer.optimizer, *trainer.optimizer._ctl_groups]
    assert [int(o.iterations.numpy()) for o in optimizers] == [3, 3, 3]


def test_scale_and_exclusions_apply_to_the_optimizer_of_a_group():
    """With decay alone, a variable shrinks by its rate; biases are excluded."""
    decay = lambda: tf_keras.optimizers.SGD(0.5, weight_decay=0.5)  # noqa: E731
    trainer = make_trainer(
        dict(variables="head/*", optimizer=decay, learning_rate_scale=0.5),
        weight_decay_exclude=["*/bias"],
    )
    (other,) = trainer.optimizer._ctl_groups
    kernel, bias = trainer.model.layers[1].weights
    bias.assign(tf.ones_like(bias))
    before = kernel.numpy()
    pairs = [(tf.zeros_like(v), v) for v in trainer.model.trainable_variables]
    trainer.optimizer.apply_gradients(pairs)
    np.testing.assert_allclose(kernel, before * (1 - 0.5 * 0.5 * 0.5), rtol=1e-7)
    np.testing.assert_array_equal(bias, np.ones(bias.shape))
    assert float(other.learning_rate) == 0.5


ADAM = tf_keras.optimizers.Adam()
SCALED = tf_keras.mixed_precision.LossScaleOptimizer


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([dict(variables="head/*", optimizer="adam")], "is 'adam', but must be a section such as"),
        ([dict(variables="head/*", optimizer={"name": "adam"})], "which only a config may have"),
        ([dict(variables="head/*", optimizer=lambda: None)], r"In optimizer.groups\[0\].optimizer: The"),
        ([dict(variables="head/*", optimizer=lambda: SCALED(head()))], "has one scale for all groups"),
        ([dict(variables=n, optimizer=ADAM) for n in ("head/*", "trunk/*")], "of other variables, too"),
        (
            [dict(variables="*", learning_rate_scale=1.0), dict(variables="head/*", optimizer=head)],
            r"optimizer.groups\[1\].optimizer has no effect",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(groups, message):
    with one_line(message):
        make_trainer(*groups)
