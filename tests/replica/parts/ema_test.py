"""The average of the weights: by numpy, on replicas, under skips, in evaluation, saved and resumed."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.replica.step.inner_loop import loop_of
from ctl.testing import tiny
from tests.support import faulty_trainers


class Normalized(tiny.TinyTrainer):
    """With moving statistics, of the global batch if the options say so."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Dense(5, name="hidden", input_shape=(4,)),
                layers.BatchNormalization(momentum=0.5, name="norm"),
                layers.Dense(3, name="head"),
            ]
        )


def make(replicas=1, cls=Normalized, *, batch=8, decay=0.75, precision="float64", **options):
    if cls is Normalized:
        options.setdefault("model", {"sync_batch_norm": True})
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.Adam(0.05),
        options=ctl.TrainerOptions(precision=precision, ema_decay=decay, **options),
    )


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


def test_averages_are_those_of_the_definition():
    trainer = make(decay=0.4)  # (1 + t) / (10 + t) is smaller in the first four steps
    close(averages(trainer), weights(trainer), 0)
    expected = average_by_numpy(trainer, 8, 0.4)
    close(averages(trainer), expected)
    # Of every weight and of every moving statistic, and none is the weight itself.
    assert len(expected) == 8
    pairs = zip(averages(trainer), weights(trainer), strict=True)
    assert min([np.abs(a - w).max() for a, w in pairs][2:]) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [(1, dict(xla="loop")), (2, dict(xla="gradients", micro_batches=2))],
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


def test_statistics_per_replica_are_averaged_per_replica():
    trainer = make(2, model={})
    variables = [v for v in trainer.model.variables if v.dtype.is_floating]

    def copies(trainer):
        return [np.stack(testing.copies(trainer.strategy, v)) for v in variables]

    expected = average_by_numpy(trainer, 3, 0.75, copies)
    state = averages_of(trainer)
    close([np.stack(testing.copies(trainer.strategy, v)) for v in state], expected)
    assert sum(not np.array_equal(*each) for each in expected) == 2  # the moving mean and variance
    # The exchange keeps every replica's own value, and not their mean.
    before = copies(trainer)
    with trainer.averaged_weights():
        close(copies(trainer), expected)
    close(copies(trainer), before, 0)


def test_skipped_step_leaves_the_averages():
    options = {"on_non_finite": "skip", "precision": "float16"}
    trainer = make(cls=faulty_trainers.Poisoned, **options)
    assert {a.dtype for a in averages(trainer)} == {np.dtype(np.float32)}
    trainer.train(tf.constant(faulty_trainers.BAD))
    before, skipped = averages(trainer), int(trainer.skipped_steps.numpy())
    trainer.train(tf.constant(1))
    assert int(trainer.skipped_steps.numpy()) == skipped + 1
    close(averages(trainer), before, 0)
    trainer.train(tf.constant(1))
    assert np.abs(averages(trainer)[0] - before[0]).max() > 0


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
    assert float(outputs["loss"]) == pytest.approx(
        float(ctl.StandardEvaluator(plain).evaluate(tf.constant(-1))["loss"]), abs=1e-12
    )


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

    with pytest.raises(ctl.UsageError, match=r"ema_decay averages the weights at the end of ctl's"):
        make(cls=Own)


class Two(tiny.TinyTrainer):
    """A second model with its own optimizer, as in a GAN; both compute the outputs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.other = tf_keras.Sequential([tf_keras.layers.Dense(3, name="other")])
            self.other_optimizer = tf_keras.optimizers.SGD(0.1)
            if self.options.model.get("built", True):
                self.other.build((None, 4))
                self.other_optimizer.build(self.other.trainable_variables)

    def forward(self, batch, training):
        outputs = super().forward(batch, training)
        return outputs + self.other(batch["x"]) if hasattr(self, "other") else outputs

    def replica_step(self, batch):
        def losses(rows):
            return self.per_example_loss(rows, self.forward(rows, True))

        self.other(batch["x"])
        self.minimize(
            batch, losses, variables=self.other.trainable_variables, optimizer=self.other_optimizer
        )
        return self.minimize(batch, losses)


def test_further_models_are_averaged_evaluated_and_restored(tmp_path):
    trainer = make(1, Two)
    variables = [*trainer.model.variables, *trainer.other.variables]
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


def test_model_that_the_step_builds_is_rejected_in_one_line():
    trainer = make(1, Two, model={"built": False})
    with pytest.raises(
        ctl.UsageError, match=r"cannot average other/kernel:0, which no model had before"
    ):
        trainer.train(tf.constant(1))


class Head(tiny.TinyTrainer):
    """Trains a head in a tuple by an optimizer of its own, and the model not at all."""

    kind = tf_keras.Sequential

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            layer = tf_keras.layers.Dense(3, name="head")
            head = layer if self.kind is tf_keras.layers.Dense else tf_keras.Sequential([layer])
            head.build((None, 3))
            self.pair = head, tf_keras.optimizers.SGD(0.1)

    def replica_step(self, batch):
        head, optimizer = self.pair

        def losses(rows):
            return self.per_example_loss(rows, head(self.forward(rows, True)))

        return self.minimize(batch, losses, variables=head.trainable_variables, optimizer=optimizer)


def test_model_in_a_tuple_is_averaged_by_the_updates_of_the_optimizer_that_is_used():
    trainer = make(1, Head)
    variables = [*trainer.model.variables, *trainer.pair[0].variables]
    expected = average_by_numpy(trainer, 4, 0.75, lambda _: [v.numpy() for v in variables])
    close(averages(trainer), expected)


def test_trained_layer_that_belongs_to_no_model_is_rejected_in_one_line():
    trainer = make(1, type("Layer", (Head,), {"kind": tf_keras.layers.Dense}))
    with pytest.raises(ctl.UsageError, match=r"cannot average kernel:0, .* part of a model"):
        trainer.train(tf.constant(1))
