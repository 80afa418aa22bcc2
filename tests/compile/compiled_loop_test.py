"""Many steps as one XLA program: the same steps for all chunks and loops."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.compile import compiled_loop
from ctl.compile.compiled_loop import CompiledLoop, chunk_size
from ctl.rows.waits import InputWait
from tests.support import faulty_trainers, reference_model


def make(*, cls=reference_model.ReferenceTrainer, replicas=1, **options):
    adam = {"optimizer": lambda: tf_keras.optimizers.Adam(1e-2)}
    return reference_model.make_trainer(
        testing.make_strategy(replicas), 7, cls=cls, **adam, **options
    )


def close(one, other):
    faulty_trainers.same(faulty_trainers.state(one), faulty_trainers.state(other), 1e-12)


class FromDataset(reference_model.ReferenceTrainer):
    dropout = 0.4
    data_factory = staticmethod(reference_model.as_dataset)


# The dropout masks are those of the step and row.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "placement"), [(FromDataset, "stream"), (reference_model.ReferenceTrainer, "device")]
)
def test_loops_that_do_not_fill_chunks_compute_the_same_steps(monkeypatch, cls, placement):
    monkeypatch.setattr(compiled_loop, "MAX_STEPS", 4)
    plain = make(cls=cls)
    compiled = make(cls=cls, xla="loop", placement=placement)
    for trainer in (plain, compiled):
        for steps in (1, 5, 3, 1, 10):
            trainer.train(tf.constant(steps))
        assert trainer.global_step.numpy() == 20
    close(plain, compiled)
    for trainer in (plain, compiled):
        trainer.train(tf.constant(3))
        trainer.global_step.assign(1)  # discards the rest of a chunk
        trainer.train(tf.constant(5))
    close(plain, compiled)


class OwnArrays(ctl.data.Arrays):
    """Reads other values than the arrays in memory."""

    def gather(self, indexes):
        return {name: value * 2 for name, value in super().gather(indexes).items()}


class FromOwnArrays(reference_model.ReferenceTrainer):
    data_factory = staticmethod(lambda split: OwnArrays(reference_model.examples()))


class Named(reference_model.ReferenceTrainer):
    data_factory = staticmethod(
        lambda split: ctl.data.arrays({**reference_model.examples(2), "name": ["a", "b"]})
    )


def test_unsupported_steps_strategies_and_data_are_rejected():
    class OwnStep(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            super().train_step(iterator)

    examples = tf.data.Dataset.from_tensor_slices(reference_model.examples()).batch(7)
    ready = {"data_factory": staticmethod(lambda split: ctl.data.GlobalBatches(examples))}
    for options, message in (
        ({"cls": OwnStep}, "does not call your train_step"),
        ({"replicas": 2}, "supports on several GPUs"),
        ({"placement": "device", "xla": "off"}, "requires xla=loop"),
        ({"cls": Named}, "XLA does not support strings"),
        ({"cls": FromDataset, "placement": "device"}, "requires arrays"),
        ({"cls": FromOwnArrays, "placement": "device"}, "requires arrays"),
        (
            {"cls": type("Ready", (reference_model.ReferenceTrainer,), ready)},
            "requires a Source or a Dataset of single examples",
        ),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            make(**{"xla": "loop", **options})
    mirrored = tf.distribute.MirroredStrategy(["/CPU:0"])
    message = r"not supported by runtime\.strategy=mirrored: choose"
    with pytest.raises(ctl.UsageError, match=message):
        reference_model.make_trainer(mirrored, 7, xla="loop")
    with pytest.raises(ctl.UsageError, match=r"runtime\.xla=step .*train_dataset"):
        make(xla="loop").train_dataset = examples


def make_loop(most):
    traces, total = [], tf.Variable(0, dtype=tf.int64)

    def step(batch):
        traces.append(batch)
        total.assign_add(batch)

    strategy = testing.make_strategy(1)
    loop = CompiledLoop(step, strategy=strategy, most=most, input_wait=InputWait(strategy))
    return loop, traces, total


def test_one_program_runs_loops_of_every_other_length_from_every_start():
    loop, traces, total = make_loop(4)
    chunks = iter(tf.data.Dataset.range(40).batch(4))
    for steps in (1, 2, 7, 3):  # 7 steps are a rest of 1, a complete chunk and 2
        loop(chunks, tf.constant(steps))
    assert total.numpy() == sum(range(13)) and len(traces) == 2
    # XLA compiles again for each value of an argument that it takes for a constant.
    compiled = loop._program.experimental_get_compiler_ir
    arguments = [(tf.range(4, dtype=tf.int64), tf.constant(i), tf.constant(4 - i)) for i in (0, 2)]
    assert len({compiled(*each)(stage="hlo") for each in arguments}) == 1


@pytest.mark.parametrize(
    ("steps", "most", "size", "runs"),
    # Loops that fit into a chunk; that are a multiple of one; and that are neither.
    [(3, 10, 9, 3), (20, 8, 5, 20), (23, 8, 8, 24)],
)
def test_the_usual_loop_has_a_known_number_of_steps(steps, most, size, runs):
    loop, traces, total = make_loop(most)
    assert loop.fit(steps) == (size != most) and loop.size == size
    assert not loop.fit(steps - 1)  # a shorter loop comes before an evaluation
    chunks = iter(tf.data.Dataset.range(200).batch(size))
    for _ in range(2):
        loop(chunks, tf.constant(steps if steps != 23 else 24))
    assert total.numpy() == sum(range(2 * runs if steps != 3 else 6)) and len(traces) == 1
    arguments = tf.range(size, dtype=tf.int64), tf.constant(0)
    program = loop.usual_program().experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")
    assert f'"known_trip_count":{{"n":"{min(loop._unit, steps)}"' in program
    loop(chunks, tf.constant(1))
    assert len(traces) == 2


def test_chunk_size_is_limited_by_bytes_and_by_steps():
    image = {"image": tf.TensorSpec([None, 28, 28], tf.uint8)}
    assert chunk_size(image, rows=128) == compiled_loop.MAX_STEPS
    large = {"image": tf.TensorSpec([None, 224, 224, 3], tf.float32)}
    assert chunk_size(large, rows=128) == 256 * 2**20 // (224 * 224 * 3 * 4 * 128)
    assert chunk_size(large, rows=10_000) == 1
