"""What is compiled for a TPU is what the trainer trains."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.hardware import strategies
from ctl.modes.aot_compile import compiler, environment, export
from ctl.modes.aot_compile.strategy import SliceStrategy
from tests import tiny

BATCH, STEPS = 8, 3
RUN_ON_CPU = pathlib.Path(__file__).with_name("run_on_cpu.py")


class OneBatch(tiny.TinyTrainer):
    """Trains on the same examples in every step, so that arguments need not change."""

    data_factory = staticmethod(lambda split: ctl.data.arrays(tiny.examples(BATCH)))


def made(replicas, **options):
    options.setdefault("precision", "float32")  # a TPU computes in no other that is as exact
    return tiny.trainer(SliceStrategy(replicas), BATCH, **options)


def test_the_strategy_counts_as_a_tpus():
    assert strategies.name_of(SliceStrategy(4)) == "tpu"


def test_a_replica_is_given_its_share_of_the_global_batch():
    trainer = made(4)
    batch, present = trainer.feed.training(BATCH, start=0).element_spec
    assert {spec.shape[0] for spec in batch.values()} == {BATCH // 4}
    assert not isinstance(present, tf.TensorSpec)


def test_ready_global_batches_are_shared_out_too():
    dataset = tf.data.Dataset.from_tensor_slices(tiny.examples(BATCH)).batch(
        BATCH, drop_remainder=True
    )

    class Ready(tiny.TinyTrainer):
        data_factory = staticmethod(lambda split: ctl.data.GlobalBatches(dataset.repeat()))

    trainer = made(4, cls=Ready)
    spec = trainer.feed.training(BATCH, start=0).element_spec
    assert {s.shape[0] for s in tf.nest.flatten(spec)} == {BATCH // 4}


@pytest.mark.parametrize("on_non_finite", ["stop", "rollback", "ignore"])
def test_a_train_step_is_a_program_whatever_is_done_about_non_finite_steps(on_non_finite):
    program = export.train_step(made(4, on_non_finite=on_non_finite))
    assert program.name == "train step"
    assert b"all-reduce" in program.hlo


def test_a_program_in_a_program_is_refused_as_by_tpustrategy():
    trainer = made(4)
    step = trainer.replica_step

    def nested(batch):
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda strategy: strategy.run(lambda: tf.constant(0.0)))
        return step(batch)

    trainer.replica_step = nested
    with pytest.raises(ctl.UsageError, match="cannot be nested"):
        export.train_step(trainer)


def test_one_replica_has_nothing_to_reduce():
    assert b"all-reduce" not in export.train_step(made(1)).hlo


def _reductions(trainer):
    """The shapes of what the exported train step reduces over the replicas."""
    export.train_step(trainer)
    traced = trainer.strategy.traced[0]
    operations = traced.function.get_concrete_function(*traced.specs).graph.get_operations()
    return [op.inputs[0].shape for op in operations if op.type == "XlaAllReduce"]


def test_gradients_loss_metrics_and_sync_bn_are_reduced_over_the_replicas():
    trainer = made(4)
    variables = trainer.model.trainable_variables
    # Beside each gradient and the loss: two sums each of the mean loss and the accuracy, and the
    # learning rate, which the first replica decides. A real TPUStrategy traces as many.
    assert len(_reductions(trainer)) == len(variables) + 1 + 2 * 2 + 1

    class Normalized(tiny.TinyTrainer):
        def build_model(self):
            inner = super().build_model()
            return tf_keras.Model(inner.inputs, ctl.SyncBatchNormalization()(inner.outputs[0]))

        def forward(self, batch, training):
            return self.model([batch["token"], batch["x"]], training=training)

    # One forward, of a row of 3 channels x 3 + 1 for each replica, and one backward.
    found = _reductions(made(4, cls=Normalized))
    assert len(found) == len(variables) + 2 + 2 + 1 + 2 * 2 + 1
    assert [4, 10] in found and [2, 1, 3] in found


def test_what_the_first_replica_decides_is_reduced_also_in_64_bits():
    # The losses before, in float32, and how many there were, in int64.
    assert len(_reductions(made(4, loss_spike=3.0))) == len(_reductions(made(4))) + 2


def test_an_evaluation_step_is_a_program():
    evaluator = ctl.StandardEvaluator(made(4))
    assert export.eval_step(evaluator).name == "eval step"


def test_a_trainers_own_train_step_is_what_is_exported():
    class Own(tiny.TinyTrainer):
        def train_step(self, iterator):
            batch, _ = next(iterator)
            self.strategy.run(lambda rows: tf.reduce_sum(rows["x"]), args=(batch,))

    program = export.train_step(made(4, cls=Own))
    whole = export.train_step(made(4))
    assert len(program.hlo) < len(whole.hlo) / 10


def test_two_programs_in_a_step_are_refused():
    class Twice(tiny.TinyTrainer):
        def train_step(self, iterator):
            batch, _ = next(iterator)
            for _ in range(2):
                self.strategy.run(lambda rows: tf.reduce_sum(rows["x"]), args=(batch,))

    with pytest.raises(ctl.UsageError, match="2 times"):
        export.train_step(made(4, cls=Twice))


def test_the_bytes_of_all_reduces_are_counted_also_of_combined_ones():
    text = """
      %all-reduce.9 = (f32[]{:T(128)}, bf16[3,3,1,32]{3,2,1,0}) all-reduce(%a, %b), channel_id=1
      %all-reduce-start.1 = f32[10]{0} all-reduce-start(%c), channel_id=2
      %all-reduce-done.1 = f32[10]{0} all-reduce-done(%all-reduce-start.1)
      %add = f32[1000]{0} add(%all-reduce.9, %d)
    """
    assert compiler.reduced(text) == [4 + 2 * 288, 40]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["", "parts"])
def test_the_exported_program_gives_the_trainers_own_weights(tmp_path, options):
    trainer = tiny.trainer(
        tf.distribute.OneDeviceStrategy("/CPU:0"),
        BATCH,
        cls=OneBatch,
        precision="float32",
        **options,
    )
    before = [v.numpy() for v in trainer.model.trainable_variables]
    trainer.train(tf.constant(STEPS))
    trained = [v.numpy() for v in trainer.model.trainable_variables]

    exported = made(1, cls=OneBatch, **options)
    hlo = export.train_step(exported).hlo
    traced = exported.strategy.traced[0]
    function = traced.function.get_concrete_function(*traced.specs)
    batch, _ = next(iter(exported.feed.training(BATCH, start=0)))
    arguments = [*tf.nest.flatten(batch), *_captured(function)]
    found = _run(tmp_path, hlo, arguments)

    by_handle = {id(v.handle): i for i, v in enumerate(function.graph.variables)}
    assert len(by_handle) == len(function.captured_inputs)  # all captures are variables
    order = [by_handle[id(handle)] for handle in function.captured_inputs]
    for variable, start, end in zip(
        exported.model.trainable_variables, before, trained, strict=True
    ):
        place = [function.graph.variables[i] is variable for i in order].index(True)
        assert np.abs(end - start).max() > 1e-3  # it was trained
        np.testing.assert_allclose(found[len(traced.specs) + place], end, rtol=0, atol=1e-5)


def _captured(function):
    values = {id(v.handle): v.numpy() for v in function.graph.variables}
    return [values[id(handle)] for handle in function.captured_inputs]


def _run(folder, hlo, arguments):
    (folder / "program.hlo").write_bytes(hlo)
    shutil.copy(compiler.__file__, folder / "compiler.py")
    np.savez(folder / "arguments.npz", **{f"arg_{i}": v for i, v in enumerate(arguments)})
    subprocess.run(
        [str(environment.python()), str(RUN_ON_CPU), str(folder), str(STEPS)],
        env={"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        check=True,
    )
    results = np.load(folder / "results.npz")
    return [results[f"arg_{i}"] for i in range(len(results.files))]
