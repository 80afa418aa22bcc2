"""The parts of a step's memory, counted by hand for a small model."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built import memory_estimate
from ctl.built.memory_estimate import Timeline, bytes_of, estimate
from ctl.errors import UsageError
from tests.support import one_batch, reference_model
from tests.support.checks import close

L = tf_keras.layers
WIDTH, FLOAT = 64, 8  # the bytes of a float64
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH) + WIDTH * 4 + 4


EXAMPLES = {"x": np.zeros([64, WIDTH]), "label": np.zeros([64], np.int32)}


class Dense(one_batch.Trainer):
    """Blocks of layers of 64 units on 64 features, and a classifier of four."""

    EXAMPLES = EXAMPLES
    layers = 1  # of each of the three blocks
    recomputed = False

    def build_model(self):
        x = inputs = L.Input([WIDTH])
        for _ in range(3):
            dense = [L.Dense(WIDTH, activation="sigmoid") for _ in range(self.layers)]
            block = tf_keras.Sequential(dense)
            x = (ctl.recompute(block) if self.recomputed else block)(x)
        return tf_keras.Model(inputs, L.Dense(4)(x))

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


class Deep(Dense):
    layers = 3


class Recomputed(Deep):
    recomputed = True


@functools.cache
def memory(cls=Dense, *, replicas=1, batch=64, optimizer="sgd", **options):
    make_optimizer = lambda: tf_keras.optimizers.get(optimizer)  # noqa: E731
    options = {"cls": cls, "optimizer": make_optimizer, "prefetch": 2, **options}
    strategy = one_batch.strategy(replicas)
    return estimate(reference_model.make_trainer(strategy, batch, **options))


ACTIVATION = 64 * WIDTH * FLOAT  # of one layer, for 64 rows


def test_variables_and_gradients_are_counted_exactly():
    parts = memory(optimizer="adam", ema_decay=0.9)
    assert parts.weights == parts.gradients == parts.parts["ema"] == PARAMETERS * FLOAT
    assert 2 * PARAMETERS * FLOAT <= parts.slots <= 2 * PARAMETERS * FLOAT + 64
    assert parts.input == 64 * (WIDTH * FLOAT + 4)
    assert parts.prefetched == 2 * parts.input
    assert parts.gradient_sum == 0 and not parts.incomplete
    assert parts.peak == parts.persistent + parts.input + parts.step


def test_activations_are_the_outputs_of_the_layers_and_one_gradient():
    parts = memory()
    # The backward pass needs the gradient of the output of a layer and computes that of its input.
    assert 4 * ACTIVATION <= parts.activations <= 5 * ACTIVATION
    assert parts.activations <= parts.step <= parts.activations + parts.gradients


def test_micro_batches_divide_the_activations():
    count = 3
    one, parts = memory(), memory(micro_batches=count)
    assert parts.micro_batches == count
    assert parts.activations == pytest.approx(one.activations / count, rel=0.1)
    assert parts.gradient_sum == parts.gradients == one.gradients
    # What a single micro-batch predicts for others is what these need, or up to one gradient more.
    predicted, exact = one.step_bytes(count), parts.step_bytes(count)
    assert 0.95 * exact <= predicted <= 1.05 * exact + parts.gradients


@pytest.mark.slow
def test_a_recomputed_block_counts_its_inputs_and_the_activations_of_one_block():
    kept, recomputed = memory(Deep), memory(Recomputed)
    assert 10 * ACTIVATION <= kept.activations <= 11 * ACTIVATION
    # Three inputs of blocks, of which one is the batch, three layers, and one gradient.
    assert 5 * ACTIVATION <= recomputed.activations <= 7 * ACTIVATION


def test_each_replica_needs_its_own_rows_and_its_own_errors_of_compressed_gradients():
    single = {"precision": "float32"}
    one, two = memory(**single), memory(replicas=2, batch=63, compression="float16", **single)
    assert two.weights == one.weights
    assert two.input == one.input // 2
    assert two.activations == pytest.approx(one.activations / 2, rel=0.1)
    assert two.parts == {"compression": two.weights}
    assert two.persistent == two.weights + two.slots + two.weights
    assert not one.parts


def test_the_buffers_of_the_reduction_follow_the_backward_pass():
    one, two = memory(batch=4), memory(replicas=2, batch=8)
    # On logical devices each gradient is reduced by itself.
    assert (one.reduction, two.reduction) == (0, 3 * WIDTH * WIDTH * FLOAT)
    # With few rows the gradients are most of a step, and the buffers exceed its activations.
    assert two.peak == two.persistent + two.input + two.gradients + two.reduction
    large = dataclasses.replace(two, reduction=10 * two.gradients)
    assert large.step_bytes(2) == two.input + 11 * two.gradients


@pytest.mark.slow
def test_logical_shards_are_sent_in_a_buffer_with_the_slots_of_all():
    assert memory(replicas=2, logical_shards=4).reduction == 4 * (
        PARAMETERS * FLOAT + 3 * WIDTH * WIDTH * FLOAT
    )


@pytest.mark.slow
def test_split_slots_are_those_of_a_replicas_slices():
    slots = memory(replicas=2, optimizer="adam", shard_state=True).slots
    # Half of the two slots of each parameter, and a slice of the parameters themselves.
    assert slots == pytest.approx((2 + 1) / 2 * PARAMETERS * FLOAT, rel=0.02)


def central(**options):
    devices = ["CPU:0", "CPU:1"]
    strategy = tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    make_optimizer = lambda: tf_keras.optimizers.Adam()  # noqa: E731
    return estimate(
        reference_model.make_trainer(
            strategy, 8, cls=Deep, optimizer=make_optimizer, prefetch=2, **options
        )
    )


@pytest.mark.slow
def test_central_storage_keeps_a_copy_of_the_weights_on_each_replica_and_no_slots(monkeypatch):
    parts, mirrored = central(ema_decay=0.9), memory(Deep, replicas=2, batch=8, optimizer="adam")
    assert (parts.weights, parts.slots, parts.parts) == (mirrored.weights, 0, {})
    # Counts what operations read of variables, from the read to the last use.
    monkeypatch.setattr(memory_estimate, "_NOT_COUNTED", ("Const", "Placeholder", "VarHandleOp"))
    kernels = 9 * WIDTH * WIDTH * FLOAT
    # The backward pass reads every kernel but the first one, which no gradient depends on: when it
    # begins, their copies exist together with the activations.
    copies = central().activations - parts.activations
    assert copies == pytest.approx(kernels - WIDTH * WIDTH * FLOAT, rel=0.03)


def test_a_train_step_of_the_user_is_not_estimated():
    class OwnStep(Dense):
        def train_step(self, iterator):
            super().train_step(iterator)

    with pytest.raises(UsageError, match="overrides train_step"):
        memory(OwnStep)


def test_estimating_changes_nothing():
    trainer = one_batch.make(Dense, 8, 1)
    before = [v.numpy() for v in trainer.model.variables]
    estimate(trainer)
    assert int(trainer.global_step) == 0 and int(trainer.optimizer.iterations) == 0
    close(trainer.model.variables, before)
    trainer.train(tf.constant(1))
    for copy in testing.copies(trainer.strategy, trainer.global_step):
        assert copy == 1


# The memory of the tensors of a graph.

KIB = 1024  # the bytes of a [256] float32


def trace(function, *specs):
    return tf.function(function).get_concrete_function(*specs or [tf.TensorSpec([256])]).graph


def peak(function, *specs):
    return max(Timeline(trace(function, *specs)).live(set()))


def kept(x):
    a = tf.cumsum(x)
    return tf.cumsum(tf.cumsum(a)) + a


def read_twice(x):
    a = tf.cumsum(x)
    return tf.exp(a) * a


def reshaped(x):
    a = tf.reshape(tf.identity(tf.cumsum(x)), [16, 16])
    return tf.matmul(a, a)


def unused(x):
    tf.cumsum(tf.cumsum(x))
    return tf.cumsum(x)


@tf.function
def inner(x):
    return tf.reduce_sum(tf.cumsum(tf.cumsum(x)))


@pytest.mark.parametrize(
    ("function", "size"),
    [
        # A tensor exists until it is read for the last time; tf.cumsum is not in place.
        (lambda x: tf.cumsum(tf.cumsum(tf.cumsum(x))), 2),
        (kept, 3),
        # Element-wise operations reuse an input that nobody reads afterwards.
        (lambda x: tf.tanh(tf.exp(tf.cumsum(x))), 1),
        (lambda x: tf.exp(x) + x, 1),  # the argument itself is not freed
        (read_twice, 2),
        # Reshaped tensors and rows are the same memory.
        (reshaped, 2),
        (lambda x: tf.cumsum(x)[:128] + 0.0, 1.5),
        # What nothing depends on is not computed.
        (unused, 1),
        # Functions count while they run.
        (lambda x: inner(x) + 1.0, 2),
    ],
)
def test_memory_of_the_tensors_of_a_graph_at_its_peak(function, size):
    assert peak(function) == size * KIB


def test_branches_count_while_they_run():
    def branches(x, flag):
        return tf.cond(flag, lambda: tf.cumsum(tf.cumsum(tf.cumsum(x) + 1)), lambda: x)

    assert peak(branches, tf.TensorSpec([256]), tf.TensorSpec([], tf.bool)) == 2 * KIB


def test_the_forward_pass_keeps_what_the_backward_pass_reads():
    """Three products and tanh: the tape keeps the three outputs of tanh, [4, 64] each."""
    kernels = [tf.Variable(tf.eye(64)) for _ in range(3)]
    gradients = []

    def step(x):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_sum(x)
        gradients[:] = tape.gradient(loss, kernels)
        return gradients

    timeline = Timeline(trace(step, tf.TensorSpec([4, 64])))
    # At its peak the backward pass has in addition the gradient of one output and of one input.
    assert max(timeline.live({id(x) for x in gradients})) == (3 + 1) * KIB
    assert max(timeline.live(set())) >= 3 * 16 * KIB


def test_sizes_that_are_not_known_are_reported():
    timeline = Timeline(trace(lambda x: tf.cumsum(tf.boolean_mask(x, x > 0))))
    assert timeline.unknown
    assert not Timeline(trace(tf.cumsum)).unknown


def test_bytes_of_tensors_and_variables():
    assert bytes_of(tf.zeros([3, 2], tf.float16)) == 12
    assert bytes_of(tf.Variable([1.0, 2.0])) == 8
    assert bytes_of(tf.TensorSpec([None, 2])) is None
    assert bytes_of(tf.constant("text")) == 0
