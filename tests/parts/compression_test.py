"""The compressed update depends on the batches and the kept errors alone, and survives kills.

See docs/step.md, section 16. tests/update/update_test.py skips steps.
"""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.parts.compression import Compression
from tests.support import faulty_trainers, reference_model
from tests.support.second_model import SecondModel

FLOAT16 = {"compression": "float16", "precision": "float32"}
MOMENTUM = {"optimizer": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9)}


def make(replicas, batch=7, **options):
    tf_keras.backend.reset_uids()  # a checkpoint has the names of the variables
    options = MOMENTUM | FLOAT16 | options
    return reference_model.make_trainer(testing.make_strategy(replicas), batch, **options)


end = faulty_trainers.state


def part_of(trainer):
    (part,) = loop_of(trainer).step.parts
    return part


def errors(trainer):
    """The [replicas, ...] errors of each compressed variable."""
    return [error.numpy() for error in part_of(trainer).errors]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def largest_difference(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))


def test_update_and_new_error_sum_to_the_gradient_and_the_old_error():
    trainer = make(1, 5, optimizer=lambda: tf_keras.optimizers.SGD(1.0))
    for step in range(4):
        weights, old = trainer.model.get_weights(), errors(trainer)
        trainer.train(tf.constant(1))
        updates = [a - b for a, b in zip(weights, trainer.model.get_weights(), strict=True)]
        rows = reference_model.pick(reference_model.examples(), faulty_trainers.batch_of(step, 5))
        _, gradients, _ = reference_model.loss_and_gradients(weights, rows)
        changes = [new.sum(0) - e.sum(0) for new, e in zip(errors(trainer), old, strict=True)]
        # The first error is that of the embedding, whose gradient is sparse.
        assert not changes[0].any() and all(change.any() for change in changes[1:])
        for update, change, gradient in zip(updates, changes, gradients, strict=True):
            np.testing.assert_allclose(update + change, gradient, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_resumed_run_has_the_same_bits_and_other_replicas_get_their_share(tmp_path):
    replicas, count = 4, 2
    trainer = make(replicas)
    trainer.train(tf.constant(3))
    Checkpointer(tmp_path, trainer).save()
    saved = errors(trainer)
    assert len({error.tobytes() for error in errors(trainer)[1]}) == replicas  # all differ
    trainer.train(tf.constant(3))
    expected = end(trainer), errors(trainer)
    Checkpointer(tmp_path, trainer).all_restore_latest()
    assert same(errors(trainer), saved)
    trainer.train(tf.constant(3))
    assert same(end(trainer), expected[0]) and same(errors(trainer), expected[1])

    other = make(count)
    Checkpointer(tmp_path, other).all_restore_latest()
    for one, old in zip(errors(other), saved, strict=True):
        for value in one:
            np.testing.assert_allclose(value, old.sum(0) / count, rtol=0, atol=1e-7)
    other.train(tf.constant(3))
    assert largest_difference(end(other), end(trainer)) <= 1e-3


def test_errors_are_not_scaled_by_the_loss_scale():
    """Another scale in each step gives the steps of a constant one."""
    changing, constant = (make(1, 8, precision="float16") for _ in range(2))
    for scale in (2.0**10, 2.0**4, 2.0**12):
        changing.optimizer.dynamic_counter.assign(0)
        changing.optimizer._loss_scale._current_loss_scale.assign(scale)
        changing.train(tf.constant(1))
        constant.optimizer._loss_scale._current_loss_scale.assign(2.0**8)
        constant.train(tf.constant(1))
    assert largest_difference(errors(changing), errors(constant)) < 2e-3
    assert largest_difference(changing.model.get_weights(), constant.model.get_weights()) < 2e-3


def test_models_and_options_without_effect_are_rejected_in_one_line():
    classes = SecondModel, reference_model.ReferenceTrainer
    message = (
        "cannot compress the gradient of .*hidden/kernel:0, which the step created: build every"
    )
    with pytest.raises(ctl.UsageError, match=message):
        make(1, cls=type("Lazy", classes, {"is_built": False})).train(tf.constant(1))
    own = {"train_step": lambda self, iterator: None}
    message = (
        r"compression reduces the gradients in ctl's own step, but this trainer overrides train_st"
    )
    with pytest.raises(ctl.UsageError, match=message):
        make(1, cls=type("Own", (reference_model.ReferenceTrainer,), own))


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        (1, "as those of several replicas, but one replica sends nothing"),
        (2, "0.00 MiB in place of 0.00 MiB per step and replica"),
    ],
)
def test_bytes_and_what_an_update_depends_on_are_described(replicas, how):
    assert loop_of(make(replicas)).step.describe()["reduction"] == (
        f"Dense gradients are compressed by float16: {how}. An update is no longer a function of the "
        "global batch alone: it also depends on what earlier steps held back, and on how the batch is "
        "split."
    )


# The sums of the replicas, on a model of one variable.


def send(name, gradients, steps=1):
    """Sums [replicas, n] gradients in each step: the [steps, n] updates and the [replicas, n] errors."""
    where = testing.make_strategy(len(gradients))
    with where.scope():
        layer = tf_keras.layers.Dense(len(gradients[0]), use_bias=False, input_shape=(1,))
        model = tf_keras.Sequential([layer])
        compression = Compression(ctl.TrainerOptions(compression=name))
        compression.create(types.SimpleNamespace(own_train_step=False), model)
    values = tf.constant(gradients, tf.float32)[:, tf.newaxis]

    @tf.function
    def reduce_once():
        def step():
            value = values[tf.distribute.get_replica_context().replica_id_in_sync_group]
            loss = tf.constant(0.0)
            update = compression.reduce([value], loss, [layer.kernel], loss_scale=None)
            compression.after(update, None, True)
            return update.gradients[0][0]

        return where.run(step)

    updates = []
    for _ in range(steps):
        copies = [copy.numpy() for copy in where.experimental_local_results(reduce_once())]
        assert all(np.array_equal(copies[0], copy, equal_nan=True) for copy in copies)
        updates.append(copies[0])
    (error,) = compression.errors
    return np.array(updates, np.float64), error.numpy()[:, 0].astype(np.float64)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_updates_and_the_error_sum_to_the_gradients(name):
    gradient = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    updates, errors = send(name, gradient, steps=20)
    assert np.abs(updates[0] - gradient[0]).max() > 1e-4  # rounded
    # The additions in float32 round by 2^-24.
    np.testing.assert_allclose(updates.sum(0) + errors[0], 20 * gradient[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(updates.mean(0), gradient[0], rtol=0, atol=1e-3)


def test_elements_below_the_range_of_float16_are_sent_once_they_have_added_up():
    updates, errors = send("float16", [[1e-8], [1e-8]], steps=30)
    assert updates[0] == 0.0 and (updates > 0).any()
    assert updates.sum() + errors.sum() == pytest.approx(6e-7, rel=1e-5)
    assert updates.sum() > 4e-7


def test_elements_above_the_range_of_float16_are_sent_in_parts():
    replicas = 3
    updates, errors = send("float16", [[1e5, -1e5]] * replicas, steps=2)
    assert np.isfinite(updates).all() and np.abs(updates).min() >= 2**14
    sums = updates.sum(0) + errors.sum(0)
    np.testing.assert_allclose(sums, [2e5 * replicas, -2e5 * replicas], rtol=1e-6)


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_an_element_that_is_not_finite_stays_not_finite(bad):
    updates, _ = send("float16", [[1.0, bad], [1.0, 1.0]])
    assert updates[0][0] == 2.0 and not np.isfinite(updates[0][1])
