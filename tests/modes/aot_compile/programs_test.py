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
from ctl.replica.step.inner_loop import loop_of
from tests.support import reference_model

BATCH, STEPS = 8, 3
RUN_ON_CPU = pathlib.Path(__file__).with_name("run_on_cpu.py")


class OneBatch(reference_model.ReferenceTrainer):
    """Trains on the same examples in every step, so the program's batch stays the same."""

    data_factory = staticmethod(lambda split: ctl.data.arrays(reference_model.examples(BATCH)))


@pytest.mark.parametrize("on_non_finite", ["stop", "rollback", "ignore"])
def test_a_train_step_is_one_program_for_each_reaction_to_non_finite_steps(
    make_trainer, on_non_finite
):
    program = programs.export_train_step(make_trainer(4, on_non_finite=on_non_finite))
    assert program.name == "train step"
    assert b"all-reduce" in program.hlo


def test_one_replica_has_no_all_reduce(make_trainer):
    assert b"all-reduce" not in programs.export_train_step(make_trainer(1)).hlo


def test_train_step_is_the_one_that_trains_the_layers_of_frozen_until(
    make_trainer, all_reduce_shapes
):
    tf_keras.backend.reset_uids()
    frozen = make_trainer(4, optimizer_groups=[dict(variables="dense/*", frozen_until=4)])
    assert len(all_reduce_shapes(frozen)) == len(all_reduce_shapes(make_trainer(4)))
    [warning] = programs.export_train_step(frozen).warnings
    assert "this is the one from step 4 on" in str(warning)


def test_gradients_loss_metrics_and_sync_bn_are_all_reduced(make_trainer, all_reduce_shapes):
    trainer = make_trainer(4)
    variables = trainer.model.trainable_variables
    # In addition to each gradient and the loss: two sums each for the mean loss and the accuracy,
    # and the learning rate, which the first replica broadcasts. A real TPUStrategy has as many.
    assert len(all_reduce_shapes(trainer)) == len(variables) + 1 + 2 * 2 + 1

    class Normalized(reference_model.ReferenceTrainer):
        def build_model(self):
            inner = super().build_model()
            return tf_keras.Model(inner.inputs, ctl.SyncBatchNormalization()(inner.outputs[0]))

        def forward(self, batch, training):
            return self.model([batch["token"], batch["x"]], training=training)

    # One in the forward pass, a row of 3 channels x 3 + 1 per replica, and one in the backward pass.
    shapes = all_reduce_shapes(make_trainer(4, cls=Normalized))
    assert len(shapes) == len(variables) + 2 + 2 + 1 + 2 * 2 + 1
    assert [4, 10] in shapes and [2, 1, 3] in shapes


def test_an_evaluation_step_is_one_program(make_trainer):
    evaluator = ctl.StandardEvaluator(make_trainer(4))
    assert programs.export_eval_step(evaluator).name == "eval step"


@pytest.mark.slow
def test_an_overridden_train_step_is_what_is_exported(make_trainer):
    class Sum(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            batch, _ = next(iterator)
            self.strategy.run(lambda rows: tf.reduce_sum(rows["x"]), args=(batch,))

    program = programs.export_train_step(make_trainer(4, cls=Sum))
    complete = programs.export_train_step(make_trainer(4))
    assert len(program.hlo) < len(complete.hlo) / 10


def test_two_programs_in_one_step_are_rejected(make_trainer):
    class Twice(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            batch, _ = next(iterator)
            for _ in range(2):
                self.strategy.run(lambda rows: tf.reduce_sum(rows["x"]), args=(batch,))

    with pytest.raises(ctl.UsageError, match="2 times"):
        programs.export_train_step(make_trainer(4, cls=Twice))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["", "parts"])
def test_the_exported_program_computes_the_trainers_own_weights(make_trainer, tmp_path, options):
    trainer = reference_model.make_trainer(
        tf.distribute.OneDeviceStrategy("/CPU:0"),
        BATCH,
        cls=OneBatch,
        precision="float32",
        **options,
    )
    before = [v.numpy() for v in trainer.model.trainable_variables]
    trainer.train(tf.constant(STEPS))
    trained = [v.numpy() for v in trainer.model.trainable_variables]

    exported = make_trainer(1, cls=OneBatch, **options)
    hlo = programs.export_train_step(exported).hlo
    traced = exported.strategy.traced[0]
    function = traced.function.get_concrete_function(*traced.specs)
    batch, _ = next(iter(loop_of(exported).pipeline.training_dataset(BATCH, start=0)))
    results = run_on_cpu(tmp_path, hlo, [*tf.nest.flatten(batch), *captured_values(function)])

    by_handle = {id(v.handle): i for i, v in enumerate(function.graph.variables)}
    assert len(by_handle) == len(function.captured_inputs)  # all captures are variables
    order = [by_handle[id(handle)] for handle in function.captured_inputs]
    for variable, start, end in zip(
        exported.model.trainable_variables, before, trained, strict=True
    ):
        index = [function.graph.variables[i] is variable for i in order].index(True)
        assert np.abs(end - start).max() > 1e-3  # it was trained
        np.testing.assert_allclose(results[len(traced.specs) + index], end, rtol=0, atol=1e-5)


def captured_values(function):
    values = {id(v.handle): v.numpy() for v in function.graph.variables}
    return [values[id(handle)] for handle in function.captured_inputs]


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
