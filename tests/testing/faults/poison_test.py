"""Poison hits exactly the named examples, or the named replica at the named step."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import NonFiniteStep
from ctl.replica.step.engine import engine_of
from ctl.testing import faults
from tests import reference_model
from tests.reference_model import EXAMPLES, ReferenceTrainer, examples


def make_trainer(replicas=1, *, cls=ReferenceTrainer, **options):
    return reference_model.make_trainer(
        testing.make_strategy(replicas),
        7,
        cls=cls,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
        **options,
    )


def test_only_the_named_examples_are_poisoned():
    original = examples()
    source = faults.poisoned(ctl.data.arrays(original), [3, 17], "x")
    rows = source.gather(tf.range(EXAMPLES, dtype=tf.int64))
    assert isinstance(source, ctl.data.Arrays)
    poisoned = np.isnan(rows["x"].numpy())
    assert poisoned[[3, 17]].all()
    others = np.delete(rows["x"].numpy(), [3, 17], axis=0)
    np.testing.assert_array_equal(others, np.delete(original["x"], [3, 17], axis=0))
    np.testing.assert_array_equal(rows["label"], original["label"])


def test_order_of_the_examples_stays_that_of_the_source():
    values = np.arange(12.0)
    tokens = ctl.data.sequences({"x": [[v] * (1 + i % 3) for i, v in enumerate(values)]})
    numbers = ctl.data.arrays({"x": values})
    for source in (
        ctl.data.bucketed(tokens, [1, 3]),
        ctl.data.mixture({"a": (numbers, 1), "b": (numbers, 2)}),
    ):
        poisoned = faults.poisoned(source, [5], "x")
        order = {"batch_size": 4, "seed": 3, "span": 12}
        indexes = [
            s.training_order(tf.range(12, dtype=tf.int64), **order) for s in (source, poisoned)
        ]
        np.testing.assert_array_equal(indexes[0][0], indexes[1][0])
        (nan,) = np.isnan(poisoned.gather(tf.constant([5], tf.int64))["x"].numpy())
        assert nan.any()
        assert poisoned.has_one_shape == source.has_one_shape


class Streamed(ctl.data.Source):
    """A user's own source of the same examples."""

    def __len__(self):
        return EXAMPLES

    def gather(self, indexes):
        return ctl.data.arrays(examples()).gather(indexes)


def test_poisoned_example_of_one_replica_breaks_its_step_on_other_replicas():
    example = faults.example_on(make_trainer(4), step=2, replica=3)

    class Poisoned(ReferenceTrainer):
        data_factory = staticmethod(lambda split: faults.poisoned(Streamed(), [example], "x"))

    with pytest.raises(NonFiniteStep) as raised:
        make_trainer(1, cls=Poisoned).train(tf.constant(3))
    assert raised.value.step == 2


def test_example_on_returns_the_examples_in_the_order_of_the_global_batch():
    trainer = make_trainer(4)  # rows 2, 2, 2, 1
    indexes = [faults.example_on(trainer, step=5, replica=r) for r in range(4)]
    assert indexes == engine_of(trainer).pipeline.example_indexes(7, 5)[::2]
    with pytest.raises(ctl.UsageError, match=r"no row on replica 4.*\[2, 2, 2, 1\]"):
        faults.example_on(trainer, step=5, replica=4)


def test_poisoned_step_changes_one_step_on_one_replica():
    def poison(step):
        with ctl.replica.examples(step=tf.constant(step, tf.int64)):
            batch = {"x": tf.ones([2, 3]), "label": tf.zeros([2], tf.int64)}
            return faults.poisoned_step(batch, "x", step=5, replica=1)["x"]

    strategy = testing.make_strategy(4)
    for step in (4, 5, 6):
        values = strategy.run(tf.function(poison), args=(step,))
        poisoned = [
            bool(tf.reduce_all(tf.math.is_nan(x)))
            for x in strategy.experimental_local_results(values)
        ]
        assert poisoned == [step == 5 and replica == 1 for replica in range(4)]


class PoisonedOnce(ReferenceTrainer):
    def forward(self, batch, training):
        if training:
            batch = faults.poisoned_step(batch, "x", step=5, replica=0)
        return super().forward(batch, training)


@pytest.mark.slow
@pytest.mark.parametrize("xla", ["gradients", "step", "loop"])
def test_poisoned_step_is_the_same_step_in_every_mode_of_xla(xla):
    trainer = make_trainer(cls=PoisonedOnce, xla=xla)
    trainer.train(tf.constant(5))
    with pytest.raises(NonFiniteStep) as raised:
        trainer.train(tf.constant(5))
    assert raised.value.step == 5


def test_poisoned_step_is_skipped_on_request_and_evaluations_stay_finite():
    trainer = make_trainer(2, cls=PoisonedOnce, on_non_finite="skip")
    trainer.train(tf.constant(5))
    loss = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))["loss"]  # at step 5
    assert np.isfinite(float(loss))
    trainer.train(tf.constant(5))
    assert (trainer.skipped_steps.numpy(), trainer.global_step.numpy()) == (1, 10)


def test_poison_that_would_have_no_effect_is_an_error():
    source = ctl.data.arrays(examples())
    with pytest.raises(ctl.UsageError, match=r"'label' cannot be poisoned.*'x', 'weight'"):
        faults.poisoned(source, [1], "label")
    with pytest.raises(ctl.UsageError, match=r"Example 23 .* must be 0 to 22"):
        faults.poisoned(source, [23], "x")

    class Elsewhere(ReferenceTrainer):
        def forward(self, batch, training):
            batch = faults.poisoned_step(batch, "x", step=1, replica=2)
            return super().forward(batch, training)

    with pytest.raises(ctl.UsageError, match=r"no replica 2: replicas are numbered 0 to 1"):
        make_trainer(2, cls=Elsewhere).train(tf.constant(1))


def test_planted_value_skips_one_step():
    trainer = testing.tiny_trainer(testing.make_strategy(2), on_non_finite="skip")
    with pytest.raises(ctl.UsageError, match="no replica 2: replicas are numbered 0 to 1"):
        testing.plant(trainer, replica=2)
    testing.plant(trainer, math.inf, replica=1, step=1)
    trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    assert trainer.optimizer.iterations.numpy() == 2
    with pytest.raises(ctl.UsageError, match="has already trained"):
        testing.plant(trainer, replica=0)
