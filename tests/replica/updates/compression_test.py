"""The compressed update depends on the batches and the kept errors alone, and survives kills and skips.

By hand: docs/step.md, section 16. `E` is the sum of the replicas' errors.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.replica.step.engine import engine_of
from tests.support import faulty_trainers, reference_model

POWERSGD = {"compression": "powersgd", "compression_rank": 1}
FLOAT16 = {"compression": "float16", "precision": "float32"}
MOMENTUM = {"optimizer": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9)}


def make(replicas, batch=7, **options):
    tf_keras.backend.reset_uids()  # a checkpoint has the names of the variables
    options = {**MOMENTUM, **(options if "compression" in options else POWERSGD | options)}
    return reference_model.make_trainer(testing.make_strategy(replicas), batch, **options)


end = faulty_trainers.state


def errors(trainer):
    """The [replicas, ...] errors of each compressed variable."""
    return [error.numpy() for error in engine_of(trainer).step.update.compression.state.errors]


def kept(trainer):
    factors = engine_of(trainer).step.update.compression.state.factors
    return [*errors(trainer), *(np.asarray(factor.numpy()) for factor in factors)]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def largest_difference(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))


def check_copies(trainer):
    factors = engine_of(trainer).step.update.compression.state.factors
    for variable in (*trainer.model.variables, *factors):
        first, *others = testing.copies(trainer.strategy, variable)
        assert all(np.array_equal(first, other) for other in others)


@functools.cache
def fifty_steps(batch, replicas, accumulation):
    trainer = make(replicas, batch, micro_batches=accumulation)
    trainer.train(tf.constant(50))
    check_copies(trainer)
    factors = engine_of(trainer).step.update.compression.state.factors
    sums = [error.sum(axis=0) for error in errors(trainer)]
    return end(trainer), sums, [np.asarray(factor.numpy()) for factor in factors]


@pytest.mark.parametrize(
    ("batch", "replicas", "accumulation"),
    [
        (5, 2, 1),
        pytest.param(5, 4, 2, marks=pytest.mark.slow),  # 2 + 2 + 1 + 0 rows
    ],
)
def test_fifty_powersgd_steps_are_the_same_on_any_number_of_replicas(batch, replicas, accumulation):
    for one, other in zip(
        fifty_steps(batch, 1, 1), fifty_steps(batch, replicas, accumulation), strict=True
    ):
        assert largest_difference(one, other) <= 1e-10


def test_update_and_new_error_sum_to_the_gradient_and_the_old_error():
    trainer = make(2, 5, optimizer=lambda: tf_keras.optimizers.SGD(1.0))
    for step in range(4):
        weights, old = trainer.model.get_weights(), errors(trainer)
        trainer.train(tf.constant(1))
        updates = [a - b for a, b in zip(weights, trainer.model.get_weights(), strict=True)]
        rows = reference_model.pick(reference_model.examples(), faulty_trainers.batch_of(step, 5))
        _, gradients, _ = reference_model.loss_and_gradients(weights, rows)
        compressed = 0
        names = [variable.name.partition("/")[0] for variable in trainer.model.variables]
        for i, (update, gradient) in enumerate(zip(updates, gradients, strict=True)):
            if names[i].startswith("dense") and gradient.ndim == 2:
                # The first error is that of the embedding, whose gradient is sparse.
                compressed += 1
                assert np.linalg.matrix_rank(update, tol=1e-9) == 1
                assert np.abs(update - gradient).max() > 1e-3
                update = update + errors(trainer)[compressed].sum(0) - old[compressed].sum(0)
            np.testing.assert_allclose(update, gradient, rtol=0, atol=1e-12)
        assert compressed == 2 and not errors(trainer)[0].any()


@pytest.mark.parametrize(
    ("options", "replicas", "others"),
    [(POWERSGD, 2, (1,)), pytest.param(FLOAT16, 4, (2,), marks=pytest.mark.slow)],
)
def test_resumed_run_has_the_same_bits_and_other_replicas_get_their_share(
    tmp_path, options, replicas, others
):
    trainer = make(replicas, **options)
    trainer.train(tf.constant(3))
    Checkpointer(tmp_path, trainer).save()
    saved = kept(trainer)
    assert len({error.tobytes() for error in errors(trainer)[1]}) == replicas  # all differ
    trainer.train(tf.constant(3))
    expected = end(trainer), kept(trainer)
    Checkpointer(tmp_path, trainer).all_restore_latest()
    assert same(kept(trainer), saved)
    trainer.train(tf.constant(3))
    assert same(end(trainer), expected[0]) and same(kept(trainer), expected[1])

    for count in others:
        other = make(count, **options)
        Checkpointer(tmp_path, other).all_restore_latest()
        for one, old in zip(errors(other), saved, strict=False):
            for value in one:
                np.testing.assert_allclose(value, old.sum(0) / count, rtol=0, atol=1e-7)
        other.train(tf.constant(3))
        tolerance = 1e-12 if options is POWERSGD else 1e-3
        assert largest_difference(end(other), end(trainer)) <= tolerance


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {**POWERSGD, "precision": "float16"}),  # with a loss scale
        pytest.param(2, {**FLOAT16, "precision": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_skipped_step_leaves_errors_and_factors_as_they_were(replicas, options):
    planted = {"replica": replicas - 1, "position": 0, "what": "gradient"}
    cls = type("Planted", (faulty_trainers.Overflowing,), planted)
    trainer = make(replicas, 8, cls=cls, on_non_finite="skip", **options)
    trainer.train(tf.constant(1))
    before, weights = kept(trainer), trainer.model.get_weights()
    assert any(error.any() for error in before)
    trainer.train(tf.constant(1))
    assert trainer.skipped_steps.numpy() == 1
    assert same(kept(trainer), before) and same(trainer.model.get_weights(), weights)
    trainer.train(tf.constant(1))
    assert not same(kept(trainer), before)
    assert all(np.isfinite(value).all() for value in (*kept(trainer), *end(trainer)))


def test_errors_are_not_scaled_by_the_loss_scale():
    """Another scale in each step gives the steps of a constant one."""
    changing, constant = (make(1, 8, precision="float16", **POWERSGD) for _ in range(2))
    for scale in (2.0**10, 2.0**4, 2.0**12):
        changing.optimizer.dynamic_counter.assign(0)
        changing.optimizer._loss_scale._current_loss_scale.assign(scale)
        changing.train(tf.constant(1))
        constant.optimizer._loss_scale._current_loss_scale.assign(2.0**8)
        constant.train(tf.constant(1))
    assert largest_difference(kept(changing), kept(constant)) < 2e-3
    assert largest_difference(changing.model.get_weights(), constant.model.get_weights()) < 2e-3


@pytest.mark.slow
def test_compression_starts_at_its_step_however_the_steps_are_split(tmp_path):
    plain = make(1, compression="")
    plain.train(tf.constant(3))
    trainer = make(1, compression_start=3)
    checkpoints = Checkpointer(tmp_path, trainer)
    first = checkpoints.save()
    trainer.train(tf.constant(3))
    assert same(end(trainer), end(plain)) and not any(error.any() for error in errors(trainer))
    last = checkpoints.save()
    trainer.train(tf.constant(2))
    assert any(error.any() for error in errors(trainer))
    expected = end(trainer), kept(trainer)
    for path, steps in ((first, 5), (last, 2)):  # 5: at once
        checkpoints.restore(path)
        trainer.train(tf.constant(steps))
        assert same(end(trainer), expected[0]) and same(kept(trainer), expected[1])


class Lazy(reference_model.ReferenceTrainer):
    """The step builds a second model."""

    def replica_step(self, batch):
        if not hasattr(self, "other"):
            self.other = tf_keras.Sequential([tf_keras.layers.Dense(6, name="lazy")])
        self.other(batch["x"])
        return super().replica_step(batch)


def test_models_and_options_without_effect_are_rejected_in_one_line():
    message = "cannot compress the gradient of .*lazy/kernel:0, which the step created: build every"
    with pytest.raises(ctl.UsageError, match=message):
        make(1, cls=Lazy).train(tf.constant(1))
    message = (
        r"powersgd of rank 50 compresses no variable, .* choose a smaller runtime.all_reduce.rank"
    )
    with pytest.raises(ctl.UsageError, match=message):
        make(1, compression="powersgd", compression_rank=50).train(tf.constant(1))
    own = {"train_step": lambda self, iterator: None}
    message = (
        r"compression reduces the gradients in ctl's own step, but this trainer overrides train_st"
    )
    with pytest.raises(ctl.UsageError, match=message):
        make(1, cls=type("Own", (reference_model.ReferenceTrainer,), own))


def test_sparse_gradients_are_reported_and_sent_as_they_are(caplog):
    make(1).train(tf.constant(1))
    assert [r.message for r in caplog.records if "sparse" in r.message] == [
        "The gradient of embedding/embeddings:0 is sparse, so runtime.all_reduce.compression does not "
        "compress it."
    ]


def test_bytes_and_the_method_are_described():
    trainer = make(2, compression_start=3)
    engine = engine_of(trainer)
    compression, models = engine.step.update.compression, engine.step.attributes.models()
    # Float64: the biases of 5 and 3 elements, and factors of 6 + 2, 6 + 5 and 5 + 3 elements.
    assert compression.count_bytes(models) == (8 * (12 + 30 + 5 + 15 + 3), 8 * (8 + 8 + 11 + 8))
    assert compression.describe(models) == (
        "powersgd of rank 1 from step 3 on: 0.00 MiB in place of 0.00 MiB"
    )
    sixteen = engine_of(make(2, **FLOAT16))
    models = sixteen.step.attributes.models()
    assert sixteen.step.update.compression.count_bytes(models) == (4 * 65, 2 * 65)
