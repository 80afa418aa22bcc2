"""Parts of users, and `transform_gradients`: the same update on every split, and an exact resume."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.update.gradients import map_values
from tests.support import faulty_trainers, reference_model

# Replicas and rows: even, and uneven with a replica without rows.
SPLITS = [(2, 8), (4, 5)]


def centralize(gradient):
    """Subtracts the mean over the inputs of each unit, as gradient centralization does."""
    if gradient is None or gradient.shape.rank < 2 or isinstance(gradient, tf.IndexedSlices):
        return gradient
    return gradient - tf.reduce_mean(gradient, axis=0, keepdims=True)


def add_noise(gradient):
    def noisy(values):
        noise = ctl.random.normal(tf.shape(values), shared=True, dtype=values.dtype)
        return values + 0.1 * noise

    return map_values(gradient, noisy)


class Noise(ctl.Part):
    """Adds noise that grows with the applied updates, which it counts."""

    def create(self, plan, model):
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.count = tf.Variable(0.0, dtype=plan.dtype, aggregation=first, trainable=False)

    def before(self, update):
        self.count.assign_add(1.0)
        scale = tf.convert_to_tensor(self.count)
        noisy = [map_values(add_noise(g), lambda v: v * scale) for g in update.gradients]
        update.gradients = noisy

    def state(self):
        return {"noise": self.count}


class Own(reference_model.ReferenceTrainer):
    """Noise by a part, then centralization by the method."""

    def build_parts(self):
        return [Noise()]

    def transform_gradients(self, gradients, variables):
        return [centralize(gradient) for gradient in gradients]


def make(replicas, batch, cls=Own, **options):
    options = {"optimizer": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9), **options}
    return reference_model.make_trainer(testing.make_strategy(replicas), batch, cls=cls, **options)


def difference(one, other):
    pairs = zip(one, other, strict=True)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)


@functools.cache
def trained(replicas, batch, steps=3, **options):
    trainer = make(replicas, batch, **options)
    trainer.train(tf.constant(steps))
    return trainer.model.get_weights()


@pytest.mark.slow
def test_parts_compute_the_update_of_one_replica():
    for replicas, batch in SPLITS:
        assert difference(trained(1, batch), trained(replicas, batch)) < 1e-12
    assert difference(trained(1, 8), trained(1, 8, cls=reference_model.ReferenceTrainer)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"micro_batches": 2}, {"shard_state": True}, {"logical_shards": 4}, {"xla": "gradients"},
     {"optimizer_groups": ({"variables": "dense*", "learning_rate_scale": 1.0},)}],
)  # fmt: skip
def test_options_keep_the_update_of_parts(options):
    trainer = make(2, 8, **options)
    trainer.train(tf.constant(3))
    assert difference(trained(1, 8), trainer.model.get_weights()) < 1e-12


def test_part_is_resumed_bit_for_bit(tmp_path):
    trainer, resumed = make(2, 5), make(2, 5)
    trainer.train(tf.constant(1))
    Checkpointer(tmp_path, trainer).save()
    trainer.train(tf.constant(2))
    Checkpointer(tmp_path, resumed).all_restore_latest()
    resumed.train(tf.constant(2))
    assert difference(trainer.model.get_weights(), resumed.model.get_weights()) == 0
    (count,) = [item.numpy() for n, item in resumed.checkpoint_items().items() if n == "noise"]
    assert count == 3


def test_skipped_step_restores_the_state_of_a_part():
    planted = {"replica": 1, "position": 0, "at": 1, "build_parts": lambda self: [Noise()]}
    trainer = make(
        2, 8, cls=type("Planted", (faulty_trainers.Overflowing,), planted), precision="float16",
    )  # fmt: skip
    trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    assert testing.copies(trainer.strategy, trainer.checkpoint_items()["noise"]) == [2.0, 2.0]


def test_gradients_are_unscaled_and_not_clipped():
    """One hand-computed update: the gradient times 3, clipped afterwards."""
    seen = {}

    class Tripled(reference_model.ReferenceTrainer):
        def transform_gradients(self, gradients, variables):
            seen.update(zip((v.name for v in variables), gradients, strict=True))
            return [map_values(g, lambda v: 3 * v) for g in gradients]

    trainer = make(
        1, 8, cls=Tripled, clip_value=0.05, optimizer=lambda: tf_keras.optimizers.SGD(1.0)
    )
    old = trainer.model.get_weights()
    rows = {k: v[:8] for k, v in reference_model.examples().items()}
    order = loop_of(trainer).step.first_batch()[0]
    rows = {k: np.asarray(order[k]) for k in rows}
    _, gradients, _ = reference_model.loss_and_gradients(old, rows)
    trainer.train(tf.constant(1))
    expected = [w - np.clip(3 * g, -0.05, 0.05) for w, g in zip(old, gradients, strict=True)]
    assert difference(trainer.model.get_weights(), expected) < 1e-12
    kinds = [isinstance(gradient, tf.IndexedSlices) for gradient in seen.values()]
    assert kinds == [True, False, False, False, False]


def test_step_of_an_own_loop_has_parts_and_the_method():
    results = []
    for replicas in (1, 2):
        strategy = testing.make_strategy(replicas)
        step = ctl.Step(
            lambda: tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=[3])]),
            lambda: tf_keras.optimizers.SGD(0.1),
            lambda batch, outputs: tf.reduce_sum(tf.square(outputs), axis=1),
            global_batch_size=5,
            strategy=strategy,
            precision="float64",
            parts=[Noise()],
            transform_gradients=lambda gradients, variables: [centralize(g) for g in gradients],
        )
        data = ctl.data.arrays({"x": np.random.default_rng(0).normal(size=(10, 3))})
        batches = iter(ctl.data.distribute(data, 5, strategy))
        for _ in range(3):
            step(next(batches))
        results.append([*step.model.get_weights(), step.state()["noise"].numpy()])
    assert difference(*results) < 1e-12 and results[0][-1] == 3
    before = step.model.get_weights()
    step.transform_gradients = lambda gradients, variables: [tf.zeros_like(g) for g in gradients]
    step(next(batches))
    assert difference(before, step.model.get_weights()) == 0


def test_method_that_is_set_after_the_step_was_built_is_one_line():
    trainer = make(1, 8, cls=reference_model.ReferenceTrainer)
    trainer.train(tf.constant(1))
    trainer.transform_gradients = lambda gradients, variables: gradients
    with pytest.raises(UsageError, match=r"set after the step .*make a new"):
        trainer.train(tf.constant(1))


class OnlyDense(ctl.Part):
    """Adds noise to the gradients that are dense by what the variable has."""

    def before(self, update):
        update.gradients = [
            g if self.is_sparse(update, g, v) else add_noise(g)
            for g, v in zip(update.gradients, update.variables, strict=True)
        ]

    def is_sparse(self, update, gradient, variable):
        return update.is_sparse(variable)


class ByType(OnlyDense):
    """Adds noise to the gradients that are dense by their type."""

    def is_sparse(self, update, gradient, variable):
        return isinstance(gradient, tf.IndexedSlices)


def test_parts_see_one_kind_of_gradient_whatever_an_option_makes_of_it():
    parts = {"build_parts": lambda self: [OnlyDense(), ByType()]}
    cls = type("OneKind", (reference_model.ReferenceTrainer,), parts)
    one, other = (make(1, 8, cls=cls, logical_shards=shards) for shards in (0, 4))
    for trainer in (one, other):
        trainer.train(tf.constant(2))
    assert difference(one.model.get_weights(), other.model.get_weights()) < 1e-12


def returns(value):
    return {"transform_gradients": lambda self, gradients, variables: value(gradients)}


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        (returns(lambda g: g[1:]), {}, "transform_gradients left 4 gradients for 5 variables"),
        (returns(lambda g: tf.zeros([5])), {}, r"returned .*Tensor.*must return a list"),
        (
            returns(lambda g: [tf.zeros([3], tf.float64), *g[1:]]), {},
            r"left a gradient of float64 \(3,\) for embedding.* of float64 \(6, 2\)",
        ),
        ({"build_parts": lambda self: [Noise]}, {}, r"build_parts, or parts of ctl\.Step, is or has"),
        ({"build_parts": lambda self: Noise()}, {}, "is or has .*Noise: give a list"),
        ({"build_parts": lambda self: [Noise(), Noise()]}, {}, "Noise has a state named 'noise'"),
        ({"build_parts": lambda self: [PART]}, {}, "Noise is a part of another step"),
        (returns(lambda g: g), {"shard_state": "gradients"}, "complete gradients, which no"),
        (
            {**returns(lambda g: g), "replica_step": lambda s, b: tf.constant(0.0, tf.float64)}, {},
            "transform_gradients has no effect, because the step never calls self.minimize",
        ),
    ],
)  # fmt: skip
def test_wrong_parts_are_one_line(members, options, message):
    cls = type("Wrong", (reference_model.ReferenceTrainer,), members)
    with pytest.raises(UsageError, match=message):
        trainer = make(1, 8, cls=cls, **options)
        trainer.train(tf.constant(1))
        trainer.checkpoint_items()


PART = Noise()
PART._ctl_is_used = True
