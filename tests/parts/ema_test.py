"""The average of the weights: by numpy, on replicas, under skips, in evaluation, saved and resumed."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.testing import tiny
from tests.support import reference_model
from tests.support.checks import one_line
from tests.support.second_model import SecondModel


class Normalized(tiny.TinyTrainer):
    """With moving statistics, of the global batch if the options say so."""

    def build_model(self):
        layers = tf_keras.layers
        dense = layers.Dense(5, name="hidden", input_shape=(4,))
        norm = layers.BatchNormalization(momentum=0.5, name="norm")
        return tf_keras.Sequential([dense, norm, layers.Dense(3, name="head")])


def make(replicas=1, cls=Normalized, *, batch=8, decay=0.75, **options):
    if cls is Normalized:
        options.setdefault("model", {"sync_batch_norm": True})
    return reference_model.make_trainer(
        testing.make_strategy(replicas), batch, cls=cls, ema_decay=decay,
        optimizer=lambda: tf_keras.optimizers.Adam(0.05), **options,
    )  # fmt: skip


def weights(trainer):
    return [v.numpy() for v in trainer.model.variables if v.dtype.is_floating]


def averages_of(trainer):
    (average,) = loop_of(trainer).step.parts
    return average.averages


def averages(trainer):
    return [v.numpy() for v in averages_of(trainer)]


def average_by_numpy(trainer, steps, decay, read=weights):
    """Trains step by step, and returns the averages as the documentation defines them."""
    expected = read(trainer)
    for t in range(1, steps + 1):
        trainer.train(tf.constant(1))
        d = min(decay, (1 + t) / (10 + t))
        expected = [d * e + (1 - d) * w for e, w in zip(expected, read(trainer), strict=True)]
    return expected


def close(actual, expected, tolerance=1e-13):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@functools.cache
def shared():
    """A trainer whose weights and averages any test may move."""
    return make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"), [(1, dict(xla="loop")), (2, dict(xla="gradients", micro_batches=2))]
)
def test_averages_do_not_depend_on_replicas_and_compilation(replicas, options):
    expected = average_by_numpy(make(cls=tiny.TinyTrainer), 5, 0.75)
    trainer = make(replicas, cls=tiny.TinyTrainer, **options)
    trainer.train(tf.constant(5))
    close(averages(trainer), expected, 1e-10)
    check_copies(trainer)


def check_copies(trainer):
    for variable in averages_of(trainer):
        first, *others = testing.copies(trainer.strategy, variable)
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_averages_are_those_of_the_definition():
    """Of every weight, and of every moving statistic per replica."""
    trainer = make(2, decay=0.4, model={})  # (1 + t) / (10 + t) is smaller in the first four steps
    variables = [v for v in trainer.model.variables if v.dtype.is_floating]

    def copies(trainer, variables=variables):
        return [np.stack(testing.copies(trainer.strategy, v)) for v in variables]

    close(copies(trainer, averages_of(trainer)), copies(trainer), 0)
    expected = average_by_numpy(trainer, 8, 0.4, copies)
    close(copies(trainer, averages_of(trainer)), expected)
    assert sum(not np.array_equal(*each) for each in expected) == 2  # the moving mean and variance
    # None is the weight itself; the first kernel and bias hardly move below the normalization.
    before = copies(trainer)
    assert len(before) == 8
    assert min([np.abs(a - w).max() for a, w in zip(expected, before, strict=True)][2:]) > 1e-6
    # The exchange keeps every replica's own value, and not their mean.
    with trainer.averaged_weights():
        close(copies(trainer), expected)
    close(copies(trainer), before, 0)


def test_evaluation_uses_the_averages_and_restores_the_weights_bit_for_bit():
    trainer = shared()
    trainer.train(tf.constant(4))
    evaluator = ctl.StandardEvaluator(trainer)
    before, expected = weights(trainer), averages(trainer)
    outputs = evaluator.evaluate(tf.constant(-1))
    close((*weights(trainer), *averages(trainer)), (*before, *expected), 0)
    plain = make(decay=0.0)
    float_weights = [v for v in plain.model.variables if v.dtype.is_floating]
    for variable, value in zip(float_weights, expected, strict=True):
        variable.assign(value)
    of_plain = ctl.StandardEvaluator(plain).evaluate(tf.constant(-1))
    assert float(outputs["loss"]) == pytest.approx(float(of_plain["loss"]), abs=1e-12)


def test_weights_are_restored_after_an_exception():
    trainer = shared()
    trainer.train(tf.constant(2))
    before = weights(trainer)
    with pytest.raises(ZeroDivisionError), trainer.averaged_weights():
        with trainer.averaged_weights():  # has no further effect
            assert np.abs(weights(trainer)[0] - before[0]).max() > 0
        raise ZeroDivisionError
    close(weights(trainer), before, 0)


def test_averaged_weights_are_neither_trained_nor_saved(tmp_path):
    trainer = shared()
    checkpoints = Checkpointer(tmp_path, trainer)
    for action in (lambda: trainer.train(tf.constant(1)), checkpoints.save):
        message = "train and save outside of it"
        with pytest.raises(ctl.UsageError, match=message), trainer.averaged_weights():
            action()


@pytest.mark.slow
def test_resumed_run_has_the_bits_of_the_undisturbed_one_and_the_averages_of_one_replica(tmp_path):
    trainer, other = make(2, batch=7, on_non_finite="skip"), make(1, batch=7)
    trainer.train(tf.constant(3))
    check_copies(trainer)
    saved = averages(trainer)
    Checkpointer(tmp_path, trainer).save()
    trainer.train(tf.constant(3))
    expected = averages(trainer), weights(trainer)
    for resumed, tolerance in ((trainer, 0), (other, 1e-10)):
        Checkpointer(tmp_path, resumed).all_restore_latest()
        close(averages(resumed), saved, 0)
        resumed.train(tf.constant(3))
        close(averages(resumed), expected[0], tolerance)
        close(weights(resumed), expected[1], tolerance)


@pytest.mark.slow
def test_run_without_averages_is_continued_with_averages_in_part(tmp_path):
    plain = make(decay=0.0)
    plain.train(tf.constant(3))
    Checkpointer(tmp_path, plain).save()
    trainer = make()
    with pytest.raises(ctl.UsageError, match="does not match this trainer"):
        Checkpointer(tmp_path, trainer).all_restore_latest()
    Checkpointer(tmp_path, trainer, partial=True).all_restore_latest()
    close(averages(trainer), weights(plain), 0)


def test_own_train_step_is_rejected():
    class Own(tiny.TinyTrainer):
        def train_step(self, iterator):
            super().train_step(iterator)

    with pytest.raises(ctl.UsageError, match=r"ema_decay averages"):
        make(cls=Own)


class Two(SecondModel, tiny.TinyTrainer):
    def make_judge_optimizer(self):
        return tf_keras.optimizers.SGD(0.1)

    def keep(self, judge, optimizer):
        self.pair = judge, optimizer


def test_further_models_are_averaged_evaluated_and_restored(tmp_path):
    trainer = make(1, Two)
    variables = [*trainer.model.variables, *trainer.pair[0].variables]
    expected = average_by_numpy(trainer, 4, 0.75, lambda _: [v.numpy() for v in variables])
    close(averages(trainer), expected)
    weights_before = [v.numpy() for v in variables]
    with trainer.averaged_weights():
        close([v.numpy() for v in variables], expected)
    close([v.numpy() for v in variables], weights_before, tolerance=0)
    path = Checkpointer(tmp_path, trainer).save()
    other = make(2, Two)
    Checkpointer(tmp_path, other).restore(path)
    close(averages(other), averages(trainer), tolerance=0)


def test_models_are_averaged_by_the_updates_of_the_optimizer_that_is_used():
    trainer = make(1, type("Second", (Two,), {"trains_first": False}))
    variables = [*trainer.model.variables, *trainer.pair[0].variables]
    expected = average_by_numpy(trainer, 2, 0.75, lambda _: [v.numpy() for v in variables])
    close(averages(trainer), expected)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"is_built": False}, "cannot average hidden/kernel:0, which no model had before"),
        (
            {"make_judge": lambda self: tf_keras.layers.Dense(1, name="layer")},
            "cannot average kernel:0, .* part of a model",
        ),
    ],
)
def test_variables_that_belong_to_no_built_model_are_rejected_in_one_line(attributes, message):
    with one_line(message):
        make(1, type("Wrong", (Two,), attributes)).train(tf.constant(1))
