"""Precision, overflow, XLA modes, shards: each leaves the update what the global batch defines."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.replica.engine import engine_of
from tests import faulty_trainers, reference_model

ADAM = {"optimizer": lambda: tf_keras.optimizers.Adam(1e-2)}


class Unweighted(reference_model.ReferenceTrainer):
    weighted = False


def end(trainer):
    """Weights and slots."""
    return [v.numpy() for v in (*trainer.model.variables, *trainer.optimizer.variables)]


def moved(trainer, steps=1):
    """By how much `steps` steps of SGD with rate 1 moved the weights."""
    before = trainer.model.get_weights()
    trainer.train(tf.constant(steps))
    return [b - a for b, a in zip(before, trainer.model.get_weights(), strict=True)]


def exactly(trainer, batch):
    """The float64 gradient at a trainer's weights."""
    exact = reference_model.make_trainer(testing.make_strategy(1), batch)
    exact.model.set_weights(trainer.model.get_weights())
    return moved(exact)


def close(one, other, tolerance):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("xla", ["loop", "step", "gradients"])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 2), (7, 1)])
def test_xla_modes_give_the_update_of_the_uncompiled_step(xla, replicas, batch, accumulation):
    if xla != "gradients" and replicas > 1:
        with pytest.raises(ctl.UsageError, match=r"choose runtime\.xla=gradients"):
            reference_model.make_trainer(testing.make_strategy(replicas), batch, xla=xla)
        return
    options = {"gradient_accumulation_steps": accumulation}
    plain = reference_model.make_trainer(testing.make_strategy(1), batch, **options)
    compiled = reference_model.make_trainer(
        testing.make_strategy(replicas), batch, xla=xla, **options
    )
    for trainer in (plain, compiled):
        trainer.train(tf.constant(10))
    assert engine_of(compiled).plan.xla == xla
    close(end(plain), end(compiled), 1e-10)
    # Metrics are fed by what the compiled part hands out.
    one, other = (t.train_loop_end()["accuracy"].numpy() for t in (plain, compiled))
    assert one == pytest.approx(other, abs=1e-6) and one > 0


def test_auto_compiles_nothing_on_a_cpu():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    assert engine_of(trainer).plan.xla == "off" and "CPU" in engine_of(trainer).plan.xla_reason


@pytest.mark.parametrize("batch", [8, 7])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_bfloat16_computes_the_gradient_to_its_rounding(replicas, batch):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), batch, precision="bfloat16"
    )
    exact = exactly(trainer, batch)
    rounded = moved(trainer)
    # bfloat16 keeps 8 bits: a relative error of 2^-8 an operation, and fewer than 16 in a row here.
    for one, other in zip(exact, rounded, strict=True):
        assert other.dtype == np.float32
        assert np.abs(one - other).max() <= 16 * 2**-8 * max(1.0, np.abs(one).max())


@pytest.mark.parametrize("replicas", [1, 2])
def test_float16_computes_the_gradient_to_its_rounding_whatever_the_scale(replicas):
    for scale in (0.0, 1.0, 1024.0):
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas), 8, precision="float16", loss_scale=scale
        )
        exact = exactly(trainer, 8)
        for one, other in zip(exact, moved(trainer), strict=True):
            # 11 bits, and fewer than 16 operations in a row.
            assert np.abs(one - other).max() <= 16 * 2**-11 * max(1.0, np.abs(one).max())


@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize(
    ("replicas", "replica", "accumulation", "position"),
    [(1, 0, 1, 0), (2, 0, 1, 0), (2, 1, 1, 0), (4, 3, 1, 0), (2, 1, 2, 0), (2, 0, 2, 2)],
)
def test_overflow_anywhere_skips_the_step_everywhere(
    what, replicas, replica, accumulation, position
):
    planted = {"replica": replica, "position": position, "what": what}
    cls = type("Planted", (faulty_trainers.Overflowing,), planted)
    where = testing.make_strategy(replicas)
    trainer = reference_model.make_trainer(
        where, 8, cls=cls, precision="float16", gradient_accumulation_steps=accumulation, **ADAM
    )
    trainer.train(tf.constant(1))
    before = end(trainer)
    scale = float(trainer.optimizer.loss_scale.numpy())
    outputs = trainer.train(tf.constant(1))
    changed = [not np.array_equal(a, b) for a, b in zip(before, end(trainer), strict=True)]
    assert float(trainer.optimizer.loss_scale.numpy()) == scale / 2
    assert not any(
        c
        for c, v in zip(
            changed, (*trainer.model.variables, *trainer.optimizer.variables), strict=True
        )
        if "loss_scale" not in v.name and "current" not in v.name
    )
    assert trainer.optimizer.iterations.numpy() == 1
    assert trainer.global_step.numpy() == 2
    assert outputs["skipped_steps"].numpy() == 1
    trainer.train(tf.constant(1))
    assert trainer.optimizer.iterations.numpy() == 2
    assert trainer.global_step.numpy() == 3
    for variable in trainer.model.trainable_variables:
        copies = testing.copies(where, variable)
        assert np.isfinite(copies[0]).all()
        assert all(np.array_equal(copies[0], copy) for copy in copies)


def test_schedule_follows_updates_applied_not_batches():
    def optimizer():
        schedule = tf_keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.25])
        return tf_keras.optimizers.SGD(schedule)

    trainer = reference_model.make_trainer(
        testing.make_strategy(1),
        8,
        cls=type("First", (faulty_trainers.Overflowing,), {"at": 0}),
        precision="float16",
        optimizer=optimizer,
    )
    trainer.train(tf.constant(1))  # skipped
    assert trainer.optimizer.iterations.numpy() == 0
    reference = reference_model.make_trainer(
        testing.make_strategy(1), 8, precision="float16", optimizer=optimizer
    )
    reference.global_step.assign(1)
    close(moved(trainer), moved(reference), 0)


def test_loss_scale_grows_after_its_count_of_good_steps_and_survives_a_restore(tmp_path):
    def optimizer():
        return tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(1e-3), initial_scale=8.0, dynamic_growth_steps=3
        )

    options = {"precision": "float16", "optimizer": optimizer}
    trainer = reference_model.make_trainer(testing.make_strategy(2), 8, **options)
    trainer.train(tf.constant(7))
    assert trainer.optimizer.loss_scale.numpy() == 32.0
    Checkpointer(tmp_path, trainer).save()
    other = reference_model.make_trainer(testing.make_strategy(2), 8, **options)
    Checkpointer(tmp_path, other).all_restore_latest()
    for one in (trainer, other):
        one.train(tf.constant(3))
    assert other.optimizer.loss_scale.numpy() == trainer.optimizer.loss_scale.numpy() == 64.0
    close(end(trainer), end(other), 0)


@pytest.mark.parametrize(
    ("cls", "name"), [(reference_model.ReferenceTrainer, "adam"), (Unweighted, "momentum")]
)
def test_logical_shards_give_the_same_bits_on_any_replicas(cls, name):
    optimizers = {
        "adam": lambda: tf_keras.optimizers.Adam(1e-2),
        "momentum": lambda: tf_keras.optimizers.SGD(1e-2, momentum=0.9),
    }
    ends, plain = [], []
    for replicas in (1, 2, 4):
        options = {"cls": cls, "precision": "float32", "optimizer": optimizers[name]}
        trainer = reference_model.make_trainer(
            testing.make_strategy(replicas), 16, logical_shards=4, **options
        )
        trainer.train(tf.constant(200))
        ends.append(end(trainer))
        if replicas != 2:
            trainer = reference_model.make_trainer(testing.make_strategy(replicas), 16, **options)
            trainer.train(tf.constant(200))
            plain.append(end(trainer))
    for other in ends[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(ends[0], other, strict=True))
    # Without shards the bits differ: the test above shows something.
    assert not all(np.array_equal(a, b) for a, b in zip(*plain, strict=True))


def test_logical_shards_compute_the_gradient_of_the_global_batch():
    close(
        moved(reference_model.make_trainer(testing.make_strategy(1), 8)),
        moved(reference_model.make_trainer(testing.make_strategy(2), 8, logical_shards=4)),
        1e-12,
    )


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_bfloat16_reduction_rounds_the_gradient_and_nothing_else(replicas):
    exact = reference_model.make_trainer(testing.make_strategy(1), 8, precision="float32")
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), 8, precision="float32", all_reduce_dtype="bfloat16"
    )
    for one, other in zip(moved(exact), moved(trainer), strict=True):
        # Each replica's share is rounded once, and each sum: 2^-8 of the largest share each.
        assert np.abs(one - other).max() <= (2 * replicas) * 2**-8 * max(1.0, np.abs(one).max())
        if replicas == 1:
            assert np.abs(one - other).max() <= 1e-6


def test_step_that_overflowed_is_no_part_of_the_loops_mean_loss():
    cls = type("Planted", (faulty_trainers.Overflowing,), {"what": "loss"})
    trainer = reference_model.make_trainer(
        testing.make_strategy(2), 8, cls=cls, precision="float16", **ADAM
    )
    outputs = trainer.train(tf.constant(3))
    assert np.isfinite(outputs["loss"].numpy())
    assert outputs["skipped_steps"].numpy() == 1


def test_second_optimizer_without_a_loss_scale_is_refused_under_float16():
    class Second(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return self.minimize(
                batch,
                lambda rows: tf.cast(self.forward(rows, True)[:, 0], tf.float32),
                optimizer=tf_keras.optimizers.SGD(0.1),
            )

    with pytest.raises(ctl.UsageError, match="requires a loss scale"):
        reference_model.make_trainer(
            testing.make_strategy(1), 8, cls=Second, precision="float16"
        ).train(tf.constant(1))
