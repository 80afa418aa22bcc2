"""The exported programs are those that the trainer trains and the evaluator evaluates."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.modes.aot_compile import execution, programs
from ctl.modes.aot_compile.strategy import SliceStrategy
from tests.support import reference_model

BATCH, STEPS = 8, 3


def make_trainer(replicas, **options):
    """Makes a ReferenceTrainer for a slice, in the most precise dtype that a TPU computes in."""
    options = {"precision": "float32", **options}
    return reference_model.make_trainer(SliceStrategy(replicas), BATCH, **options)


@pytest.mark.parametrize("cores", [1, 4])
def test_a_train_step_that_rolls_back_is_one_program(cores):
    program = programs.export_train_step(make_trainer(cores, on_non_finite="rollback"))
    assert program.name == "train step"
    assert (b"all-reduce" in program.hlo) == (cores > 1)


def list_all_reduces(trainer):
    """The shapes of the all-reduces in a trainer's exported train step."""
    traced = trainer.strategy.traced[0]
    graph = traced.function.get_concrete_function(*traced.specs).graph
    return [op.inputs[0].shape for op in graph.get_operations() if op.type == "XlaAllReduce"]


def count_sums(trainer):
    """The number of all-reduces of a train step: as many as with a real TPUStrategy.

    One for each gradient and the loss, two for the mean loss and two for the accuracy, and one for the
    learning rate, which the first replica broadcasts.
    """
    return len(trainer.model.trainable_variables) + 1 + 2 * 2 + 1


def test_train_step_is_the_one_that_trains_the_layers_of_frozen_until():
    tf_keras.backend.reset_uids()
    frozen = make_trainer(4, optimizer_groups=[dict(variables="dense/*", frozen_until=4)])
    [warning] = programs.export_train_step(frozen).warnings
    assert "this is the one from step 4 on" in str(warning)
    assert len(list_all_reduces(frozen)) == count_sums(frozen)


def test_gradients_loss_metrics_and_sync_bn_are_all_reduced():
    trainer = make_trainer(4, cls=SyncNormalized)
    programs.export_train_step(trainer)
    # One in the forward pass, a row of 3 channels x 3 + 1 per replica, and one in the backward pass.
    shapes = list_all_reduces(trainer)
    assert len(shapes) == count_sums(trainer) + 2
    assert [4, 10] in shapes and [2, 1, 3] in shapes


def test_an_evaluation_step_is_one_program():
    evaluator = ctl.StandardEvaluator(make_trainer(4))
    assert programs.export_eval_step(evaluator).name == "eval step"


class SumsOnly(reference_model.ReferenceTrainer):
    """Runs a program of its own in place of the training step, `times` times."""

    times = 1

    def train_step(self, iterator):
        batch, _ = next(iterator)
        for _ in range(self.times):
            self.strategy.run(lambda rows: tf.reduce_sum(rows["x"]), args=(batch,))


def test_an_overridden_train_step_is_what_is_exported_unless_it_has_two_programs():
    hlo = programs.export_train_step(make_trainer(4, cls=SumsOnly)).hlo
    assert b"all-reduce" not in hlo  # unlike the complete step
    twice = make_trainer(4, cls=SumsOnly)
    twice.times = 2
    with pytest.raises(ctl.UsageError, match="2 times"):
        programs.export_train_step(twice)


class Dropout(reference_model.ReferenceTrainer):
    dropout = 0.4


class Pairs(Dropout):
    """Compares each row with the rows of all replicas."""

    def per_example_loss(self, batch, outputs):
        every, labels = ctl.replica.all_gather(
            (outputs, batch["label"])
        )  # int64, which a TPU cannot sum
        distances = tf.reduce_sum(tf.square(outputs[:, tf.newaxis] - every[tf.newaxis]), axis=2)
        same = tf.cast(labels == batch["label"][:, tf.newaxis], outputs.dtype)
        return super().per_example_loss(batch, outputs) + tf.reduce_mean(same * distances, axis=1)


class Normalized(Dropout):
    layer = functools.partial(tf_keras.layers.BatchNormalization, synchronized=True)

    def build_model(self):
        inner = super().build_model()
        return tf_keras.Model(inner.inputs, self.layer()(inner.outputs[0]))

    def forward(self, batch, training):
        return self.model([batch["token"], batch["x"]], training=training)


class SyncNormalized(Normalized):
    dropout, layer = reference_model.ReferenceTrainer.dropout, ctl.SyncBatchNormalization


@pytest.fixture(scope="module")
def devices():
    with execution.VirtualDevices(8).started() as devices:
        yield devices


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls, batch, cores, bound, options",
    [
        (Dropout, 8, 1, 3e-6, {"micro_batches": 2}),
        (Dropout, 8, 4, 3e-6, {"micro_batches": 2, "ema_decay": 0.9}),
        (Dropout, 8, 4, 3e-6, {"logical_shards": 8}),
        (Pairs, 7, 4, 3e-6, {"clip": ctl.Clip(global_norm=0.5)}),
        (Normalized, 14, 8, 3e-6, {"model": {"sync_batch_norm": True}, "clip": ctl.Clip(norm=0.5)}),
        (Dropout, 8, 4, 4e-2, {"precision": "bfloat16"}),
    ],
)  # fmt: skip
def test_the_program_of_a_slice_trains_as_one_device(devices, cls, batch, cores, bound, options):
    def make(strategy, **more):
        optimizer = lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
        given = {"precision": "float32", **options, **more}
        return reference_model.make_trainer(strategy, batch, cls=cls, optimizer=optimizer, **given)

    alone = make(tf.distribute.OneDeviceStrategy("/CPU:0"), xla="off")
    before = [v.numpy() for v in alone.model.trainable_variables]
    alone.train(tf.constant(STEPS))
    changes = zip(alone.model.trainable_variables, before, strict=True)
    assert max(np.abs(v - old).max() for v, old in changes) > 1e-2
    trainer = make(SliceStrategy(cores))
    program = programs.export_train_step(trainer)
    results = devices.run(execution.of_slice(trainer, program.hlo, STEPS))
    expected = [v.numpy() for v in execution.state(alone)]
    difference, name = execution.largest_difference(results, trainer, expected)
    assert difference < bound, name


def test_a_difference_that_rounding_does_not_explain_is_named():
    right, wrong = (execution.CoreComparison(4, share, "dense/kernel") for share in (1e-5, 0.5))
    assert right.is_right and "computes the first 2 steps" in str(right)
    assert not wrong.is_right and "DOES NOT compute" in str(wrong) and "5.0e-01" in str(wrong)
