"""The update is that of the global batch with shards, an overflow, a reduction in bfloat16."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.testing import tiny
from tests.support import faulty_trainers, reference_model
from tests.support.checks import close
from tests.support.second_model import SecondModel

MOMENTUM = {"optimizer": lambda: tf_keras.optimizers.SGD(1e-2, momentum=0.9)}
end = faulty_trainers.state


def make(replicas, batch=8, **options):
    return reference_model.make_trainer(testing.make_strategy(replicas), batch, **options)


def exact_gradients(trainer):
    """The gradients of the first global batch."""
    rows = reference_model.pick(reference_model.examples(), faulty_trainers.batch_of(0))
    return reference_model.loss_and_gradients(trainer.model.get_weights(), rows)[1]


def train_moves(trainer):
    """Trains and returns by how much that moved the weights; under SGD of rate 1, the gradient."""
    before = trainer.model.get_weights()
    trainer.train(tf.constant(1))
    return [b - a for b, a in zip(before, trainer.model.get_weights(), strict=True)]


class Dense(faulty_trainers.Overflowing):
    """Without sparse gradients."""

    def build_model(self):
        x, layers = tf_keras.Input([reference_model.FEATURES]), tf_keras.layers
        hidden = layers.Dense(reference_model.HIDDEN, activation="tanh")(x)
        return tf_keras.Model({"x": x}, layers.Dense(reference_model.CLASSES)(hidden))


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        # Four dense gradients, and a sparse one, which has values and indices.
        (lambda: testing.make_strategy(1), [4 + 2]),
        (tf.distribute.experimental.CentralStorageStrategy, []),
    ],
)
def test_one_replica_with_its_own_variables_computes_all_gradients_before_an_update(
    strategy, count
):
    trainer = reference_model.make_trainer(strategy(), 8)
    inner_loop = loop_of(trainer)
    batch, mask = inner_loop.first_batch()
    step = tf.function(lambda: trainer.strategy.run(inner_loop.step.run, args=(batch, mask)))
    operations = step.get_concrete_function().graph.get_operations()
    joins = [op for op in operations if op.type == "IdentityN"]
    assert [len(op.inputs) for op in joins] == count


@pytest.mark.parametrize(
    ("cls", "what", "replicas", "options"),
    [
        pytest.param(faulty_trainers.Overflowing, "loss", 2, {}, marks=pytest.mark.slow),
        (Dense, "gradient", 1, {"xla": "loop"}),  # selects the update without a conditional
    ],
)
def test_overflow_anywhere_skips_the_step_everywhere(cls, what, replicas, options):
    cls = type("Planted", (cls,), {"replica": replicas - 1, "what": what})
    trainer = make(replicas, cls=cls, precision="float16", **options, **MOMENTUM)
    trainer.train(tf.constant(1))
    variables = (*trainer.model.variables, *trainer.optimizer.variables)
    kept = [v for v in variables if "loss_scale" not in v.name and "current" not in v.name]
    before, scale = [v.numpy() for v in kept], float(trainer.optimizer.loss_scale.numpy())
    outputs = trainer.train(tf.constant(1))
    faulty_trainers.same(before, [v.numpy() for v in kept])
    assert float(trainer.optimizer.loss_scale.numpy()) == scale / 2
    assert outputs["skipped_steps"].numpy() == 1
    trainer.train(tf.constant(1))
    assert (trainer.optimizer.iterations.numpy(), trainer.global_step.numpy()) == (2, 3)
    for variable in trainer.model.trainable_variables:
        copies = testing.copies(trainer.strategy, variable)
        assert np.isfinite(copies[0]).all()
        assert all(np.array_equal(copies[0], copy) for copy in copies)
    if "xla" in options:
        loop = loop_of(trainer).compiled_loop
        arguments = (loop._chunk, tf.constant(0), tf.constant(2))
        compiled = loop._program.experimental_get_compiler_ir(*arguments)(stage="hlo")
        assert " while(" in compiled and " conditional(" not in compiled


def test_skipped_step_leaves_the_weights_and_every_part_as_they_were_on_every_replica():
    """The gradient of one micro-batch of one replica overflows, and its loss is finite."""
    planted = {"replica": 1, "position": 2, "at": 1}
    trainer = make(
        2, cls=type("Planted", (faulty_trainers.Overflowing,), planted), precision="float16",
        micro_batches=2, compression="float16", ema_decay=0.9, norms="layers", **MOMENTUM,
    )  # fmt: skip
    compression, _, average = loop_of(trainer).step.parts
    assert {a.dtype for a in average.averages} == {tf.float32}
    errors = [error.local for error in compression.errors]
    variables = (*trainer.model.variables, *trainer.optimizer.variables)
    kept = [v for v in variables if "loss_scale" not in v.name and "current" not in v.name]

    def state():
        return [testing.copies(trainer.strategy, v) for v in (*errors, *average.averages, *kept)]

    applied = trainer.train(tf.constant(1))
    before, scale = state(), float(trainer.optimizer.loss_scale.numpy())
    assert any(np.any(copies) for copies in before[: len(errors)])
    skipped = trainer.train(tf.constant(1))
    faulty_trainers.same(before, state())
    assert float(trainer.optimizer.loss_scale.numpy()) == scale / 2
    assert trainer.optimizer.iterations.numpy() == 1
    assert trainer.global_step.numpy() == 2
    assert trainer.skipped_steps.numpy() == skipped["skipped_steps"].numpy() == 1
    # The loop has no step that was applied.
    names = ("loss", "accuracy", "gradient_norm", "parameter_norm", "update_norm")
    assert all(np.isfinite(applied[n]) and np.isnan(skipped[n]) for n in names)
    assert all(np.isnan(norm) for norm in skipped["layers"]["gradient_norm"].values())
    assert float(applied["gradient_non_finite_share"]) == 0
    assert 0 < float(skipped["gradient_non_finite_share"]) <= 1
    trainer.train(tf.constant(1))
    assert trainer.optimizer.iterations.numpy() == 2
    assert trainer.global_step.numpy() == 3
    after = state()
    changed = [not np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert any(changed[: len(errors)]) and all(changed[len(errors) :])
    assert np.isfinite(np.concatenate([np.ravel(copies) for copies in after])).all()
    for one, other in after[len(errors) :]:
        np.testing.assert_array_equal(one, other)
    trainer.global_step.assign(0)
    both = trainer.train(tf.constant(2))
    assert all(np.isfinite(both[n]) for n in names) and both["update_norm"] > 0


def test_logical_shards_give_the_same_bits_on_any_number_of_replicas():
    def train(replicas, **shards):
        trainer = make(replicas, 16, precision="float32", **MOMENTUM, **shards)
        trainer.train(tf.constant(20))
        return end(trainer)

    one, other = (train(n, logical_shards=4) for n in (1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    # Without shards the bits differ, so the equality above is not trivial.
    assert not all(np.array_equal(a, b) for a, b in zip(one, train(1), strict=True))


class Convolutional(tiny.TinyTrainer):
    """Its convolution has a bias, whose gradient oneDNN may fuse with that of the kernel."""

    def build_model(self):
        layers = tf_keras.layers
        first = layers.Conv2D(8, 3, activation="tanh"), layers.Flatten()
        return tf_keras.Sequential([*first, layers.Dense(tiny.CLASSES)])

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        x = draw.normal(size=[50, 8, 8, 3]).astype(np.float32)
        return ctl.data.arrays({"x": x, "label": draw.integers(0, tiny.CLASSES, 50)})


@pytest.mark.slow
def test_logical_shards_give_the_same_bits_of_a_convolution_with_a_bias():
    ends = []
    for replicas in (1, 2):
        tf_keras.utils.set_random_seed(1)
        trainer = make(
            replicas, cls=Convolutional, precision="float32", logical_shards=4, **MOMENTUM
        )
        trainer.train(tf.constant(5))
        ends.append(end(trainer))
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))


def test_bfloat16_reduction_rounds_the_gradient_and_nothing_else():
    trainer = make(2, precision="float32", all_reduce_dtype="bfloat16")
    largest = []
    for exact, actual in zip(exact_gradients(trainer), train_moves(trainer), strict=True):
        largest.append(np.abs(exact - actual).max())
        # Each contribution is rounded once, and each sum: by 2^-8 of the largest contribution.
        assert largest[-1] <= 4 * 2**-8 * max(1.0, np.abs(exact).max())
    assert max(largest) > 1e-4


def test_second_optimizer_without_a_loss_scale_is_rejected_under_float16():
    class Second(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return self.minimize(
                batch,
                lambda rows: tf.cast(self.forward(rows, True)[:, 0], tf.float32),
                optimizer=tf_keras.optimizers.SGD(0.1),
            )

    with pytest.raises(ctl.UsageError, match="requires a loss scale"):
        make(1, cls=Second, precision="float16").train(tf.constant(1))


def test_warns_once_of_a_variable_that_the_loss_does_not_depend_on(caplog):
    class Idle(reference_model.ReferenceTrainer):
        def build_model(self):
            model = super().build_model()
            model.idle = tf.Variable(1.0, dtype=tf.float64, name="idle")
            return model

    trainer = make(2, cls=Idle)
    trainer.train(tf.constant(2))
    trainer.train(tf.constant(1))
    named = [r.message for r in caplog.records if "idle" in r.message]
    assert len(named) == 1 and "does not depend on" in named[0]
    assert trainer.model.idle.numpy() == 1.0


def test_update_without_a_loss_scale_is_kept_if_that_of_another_optimizer_overflows():
    class Second(SecondModel, reference_model.ReferenceTrainer):
        def make_judge_optimizer(self):
            return tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(1.0))

        def judge_losses(self, rows):
            return np.inf * super().judge_losses(rows)

    trainer = make(1, cls=Second, on_non_finite="ignore")
    exact = exact_gradients(trainer)  # before the weights move
    close(train_moves(trainer), exact, 1e-12)
    assert trainer.skipped_steps.numpy() == 1
