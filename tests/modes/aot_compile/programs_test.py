"""The exported programs are those that the trainer trains and the evaluator evaluates."""

import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.modes.aot_compile import compiler, compiler_process, programs
from ctl.modes.aot_compile.strategy import SliceStrategy
from ctl.replica.step.inner_loop import loop_of
from tests.support import reference_model

BATCH, STEPS = 8, 3
RUN_ON_CPU = pathlib.Path(__file__).with_name("run_on_cpu.py")


def make_trainer(replicas, **options):
    """Makes a ReferenceTrainer for a slice, in the most precise dtype that a TPU computes in."""
    options = {"precision": "float32", **options}
    return reference_model.make_trainer(SliceStrategy(replicas), BATCH, **options)


class OneBatch(reference_model.ReferenceTrainer):
    """Trains on the same examples in every step, so the program's batch stays the same."""

    data_factory = staticmethod(lambda split: ctl.data.arrays(reference_model.examples(BATCH)))


def test_a_train_step_that_rolls_back_is_one_program():
    program = programs.export_train_step(make_trainer(4, on_non_finite="rollback"))
    assert program.name == "train step"
    assert b"all-reduce" in program.hlo


def test_one_replica_has_no_all_reduce():
    assert b"all-reduce" not in programs.export_train_step(make_trainer(1)).hlo


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
    class Normalized(reference_model.ReferenceTrainer):
        def build_model(self):
            inner = super().build_model()
            return tf_keras.Model(inner.inputs, ctl.SyncBatchNormalization()(inner.outputs[0]))

        def forward(self, batch, training):
            return self.model([batch["token"], batch["x"]], training=training)

    trainer = make_trainer(4, cls=Normalized)
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


@pytest.mark.slow
def test_the_exported_program_computes_the_trainers_own_weights(tmp_path):
    options = {"cls": OneBatch, "micro_batches": 2}
    cpu = tf.distribute.OneDeviceStrategy("/CPU:0")
    trainer = reference_model.make_trainer(cpu, BATCH, precision="float32", **options)
    before = [v.numpy() for v in trainer.model.trainable_variables]
    trainer.train(tf.constant(STEPS))
    trained = [v.numpy() for v in trainer.model.trainable_variables]

    exported = make_trainer(1, **options)
    hlo = programs.export_train_step(exported).hlo
    traced = exported.strategy.traced[0]
    function = traced.function.get_concrete_function(*traced.specs)
    batch, _ = next(iter(loop_of(exported).pipeline.training_dataset(BATCH, start=0)))
    handles = [id(handle) for handle in function.captured_inputs]  # all are those of variables
    values = {id(v.handle): v.numpy() for v in function.graph.variables}
    inputs = [*tf.nest.flatten(batch), *(values[handle] for handle in handles)]
    results = run_on_cpu(tmp_path, hlo, inputs)
    for variable, start, end in zip(
        exported.model.trainable_variables, before, trained, strict=True
    ):
        assert np.abs(end - start).max() > 1e-3  # it was trained
        result = results[len(traced.specs) + handles.index(id(variable.handle))]
        np.testing.assert_allclose(result, end, rtol=0, atol=1e-5)


def run_on_cpu(folder, hlo, arguments):
    """Runs the program STEPS times in the compiler's environment; returns the last arguments."""
    (folder / "program.hlo").write_bytes(hlo)
    shutil.copy(compiler.__file__, folder / "compiler.py")
    np.savez(folder / "arguments.npz", **{f"arg_{i}": v for i, v in enumerate(arguments)})
    subprocess.run(
        [*compiler_process.find_python(), str(RUN_ON_CPU), str(folder), str(STEPS)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        check=True,
    )
    results = np.load(folder / "results.npz")
    return [results[f"arg_{i}"] for i in range(len(results.files))]
