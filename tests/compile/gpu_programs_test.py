"""Complete steps of several GPUs as one program: run on virtual devices, and compared with one device.

XLA compiles the steps with their reductions. Each program here is the one that TensorFlow gives to XLA
for GPUs. `ctl.modes.aot_compile.execution` runs it on devices of a CPU, which need no GPU.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.built.inner_loop import loop_of
from ctl.modes.aot_compile import execution
from tests.support import gpu_programs, reference_model
from tests.support.reference_model import ReferenceTrainer

STEPS = 4
# Adam divides a difference of 1e-16 by the size of a small gradient.
BOUND = 1e-9


def examples(bad=False):
    rows = reference_model.examples()
    if bad:
        rows["x"][13] = np.inf  # in the second batch
    return rows


class Bad(ReferenceTrainer):
    data_factory = staticmethod(lambda split: ctl.data.arrays(examples(bad=True)))
    dropout = 0.4


class Normalized(Bad):
    """Normalizes the outputs over the global batch, one of whose rows is infinite."""

    def build_model(self):
        inner = super().build_model()
        outputs = tf_keras.layers.BatchNormalization(synchronized=True)(inner.outputs[0])
        return tf_keras.Model(inner.inputs, outputs)

    def forward(self, batch, training):
        return self.model([batch["token"], batch["x"]], training=training)


class Stopping(Bad):
    """Has no metric, whose value of NaN depends on the order of a maximum."""

    def build_metrics(self):
        return {}


class Keras3(Bad):
    def build_model(self):
        layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dropout(0.4)]
        return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(3)])

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)


class Dropout(ReferenceTrainer):
    dropout = 0.4


class Pairs(Dropout):
    """Compares each row with the rows of all replicas."""

    def per_example_loss(self, batch, outputs):
        every = ctl.replica.all_gather(outputs)
        distances = tf.square(outputs[:, tf.newaxis] - every[tf.newaxis])
        return super().per_example_loss(batch, outputs) + tf.reduce_mean(distances, axis=[1, 2])


class Examples(Dropout):
    """Reads a dataset of examples instead of arrays."""

    data_factory = staticmethod(reference_model.as_dataset)


class Assigning(Dropout):
    """Assigns variables in the step, one of which takes the value of the first replica."""

    def build_model(self):
        first, mean = tf.VariableAggregation.ONLY_FIRST_REPLICA, tf.VariableAggregation.MEAN
        self.first = tf.Variable(0.0, dtype=tf.float64, trainable=False, aggregation=first)
        self.mean = tf.Variable(0.0, dtype=tf.float64, trainable=False, aggregation=mean)
        self.is_late = tf.Variable(False, trainable=False, aggregation=first)
        return super().build_model()

    def preprocess(self, batch):
        # The first row of the first replica is that of the global batch, and shares are equal.
        self.first.assign(tf.cast(batch["x"], tf.float64)[0, 0])
        self.mean.assign(tf.reduce_mean(tf.cast(batch["x"], tf.float64)))
        self.is_late.assign(self.global_step > 1)
        return super().preprocess(batch)


def adam():
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
    return tf_keras.optimizers.Adam(schedule)


def momentum():
    return tf_keras.optimizers.SGD(0.1, momentum=0.9)


CLIP = ctl.Clip(global_norm=0.5)
# The trainer, the rows of a batch, the optimizer and the options.
CASES = {
    "sparse": (ReferenceTrainer, 8, momentum, {}),
    "uneven": (Dropout, 7, momentum, {"on_non_finite": "ignore"}),
    "clip": (Dropout, 8, adam, {"clip": CLIP}),
    "micro": (Dropout, 8, adam, {"micro_batches": 2, "ema_decay": 0.9}),
    "skip": (Bad, 8, adam, {"on_non_finite": "skip", "clip": CLIP}),
    "stop": (Stopping, 8, momentum, {}),
    "keras 3": (Keras3, 8, momentum, {"on_non_finite": "skip", "clip": CLIP}),
    "spikes": (Dropout, 8, momentum, {"on_non_finite": "skip", "loss_spike": 3.0}),
    "pairs": (Pairs, 8, momentum, {}),
    "uneven pairs": (Pairs, 7, momentum, {}),
    "examples": (Examples, 7, momentum, {}),
    "resident": (Dropout, 7, momentum, {"placement": "device"}),
    "assigning": (Assigning, 8, momentum, {}),
    "all": (Normalized, 7, adam, {
        "model": {"sync_batch_norm": True}, "on_non_finite": "skip", "ema_decay": 0.9, "clip": CLIP,
        "norms": "global",
    }),
}  # fmt: skip
WITH_TWO = [(name, 2, "loop") for name in CASES if name not in ("uneven pairs", "micro", "clip")]
RUNS = [
    *WITH_TWO, ("uneven", 2, "step"), ("skip", 4, "step"), ("all", 4, "loop"), ("all", 4, "step"),
    ("micro", 4, "step"), ("clip", 4, "loop"), ("uneven pairs", 4, "loop"),
]  # fmt: skip


# What the others have, too: on more replicas, or in another mode.
LONG = [
    ("uneven", 2, "loop"), ("all", 2, "loop"), ("all", 4, "step"), ("skip", 4, "step"),
    ("clip", 4, "loop"),
]  # fmt: skip


def make_trainer(case, strategy, xla, **more):
    kind, rows, optimizer, options = CASES[case]
    if xla == "off":
        options = {name: value for name, value in options.items() if name != "placement"}
    return reference_model.make_trainer(
        strategy, rows, cls=kind, optimizer=optimizer, **{**options, "xla": xla, **more}
    )


def train(trainer):
    """Trains the steps; returns all variables, with the record of the steps that were not finite."""
    if recorder := loop_of(trainer).step.update.recorder:
        recorder.take = lambda: None  # reads the record once, and raises an error
    trainer.train(tf.constant(STEPS))
    return [variable.numpy() for variable in execution.state(trainer)]


@functools.cache
def on_one_device(case, **more):
    """The variables after the steps on one device of TensorFlow, without XLA."""
    trainer = make_trainer(case, tf.distribute.OneDeviceStrategy("/cpu:0"), "off", **more)
    return train(trainer)


@pytest.fixture(scope="module")
def devices():
    with execution.VirtualDevices(8).started() as devices:
        yield devices


def differ(devices, execution_, trainer, expected):
    return execution.largest_difference(devices.run(execution_), trainer, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, replicas, xla",
    [pytest.param(*run, marks=[pytest.mark.long] * (run in LONG)) for run in RUNS],
)
def test_program_computes_the_steps_of_one_device(devices, case, replicas, xla):
    with gpu_programs.pretended(replicas) as strategy:
        trainer = make_trainer(case, strategy, xla)
        program = gpu_programs.export(trainer, STEPS)
    difference, name = differ(devices, program, trainer, on_one_device(case))
    assert difference < BOUND, name


@pytest.mark.slow
def test_program_with_the_rows_of_another_replica_differs(devices):
    with gpu_programs.pretended(2) as strategy:
        trainer = make_trainer("sparse", strategy, "loop")
        program = gpu_programs.export(trainer, STEPS)
    given = program.arguments
    wrong = {name: given[name.replace("_1_", "_0_")] for name in given}
    swapped = dataclasses.replace(program, arguments=wrong)
    assert differ(devices, swapped, trainer, on_one_device("sparse"))[0] > 1e-3


@pytest.mark.slow
def test_program_of_a_worker_with_several_gpus(devices):
    with gpu_programs.pretended(2, workers=True) as strategy:
        trainer = make_trainer("all", strategy, "loop")
        program = gpu_programs.export(trainer, STEPS)
    assert differ(devices, program, trainer, on_one_device("all"))[0] < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, bound",
    [("float16", 4e-3), pytest.param("bfloat16", 4e-2, marks=pytest.mark.long)],
)
def test_program_in_16_bits_differs_by_rounding(devices, precision, bound):
    with gpu_programs.pretended(2) as strategy:
        trainer = make_trainer("skip", strategy, "loop", precision=precision)
        program = gpu_programs.export(trainer, STEPS)
    difference, name = differ(devices, program, trainer, on_one_device("skip", precision=precision))
    assert difference < bound, name


@pytest.mark.parametrize("xla", ["loop", pytest.param("step", marks=pytest.mark.slow)])
def test_one_replica_without_merges_trains_as_one_device(xla):
    """TensorFlow itself runs this program, which has no collectives, on a CPU."""
    with gpu_programs.pretended(1) as strategy:
        trainer = make_trainer("all", strategy, xla)
        found = {place: [value] for place, value in enumerate(train(trainer))}
    difference, name = execution.largest_difference(found, trainer, on_one_device("all"))
    assert difference < BOUND, name


def loss_fn(batch, outputs):
    return tf.square(tf.cast(batch["label"], outputs.dtype) - outputs[:, 0])


def make_step(strategy, xla, optimizer=None):
    """A step for a loop of one's own, and its batches."""
    with strategy.scope():
        optimizer = optimizer or momentum()
        tf_keras.utils.set_random_seed(0)
        layers = [tf_keras.layers.Dense(5, "tanh"), tf_keras.layers.Dropout(0.4)]
        model = tf_keras.Sequential([tf_keras.Input([4]), *layers, tf_keras.layers.Dense(1)])
    step = ctl.Step(
        model, optimizer, loss_fn, global_batch_size=7, strategy=strategy, xla=xla, clip=CLIP
    )
    rows = reference_model.examples()
    data = ctl.data.arrays({"x": rows["x"], "label": rows["label"]})
    return step, iter(ctl.data.distribute(data, 7, strategy))


@pytest.mark.slow
def test_step_of_ones_own_loop(devices):
    tf_keras.backend.set_floatx("float64")
    try:
        step, batches = make_step(tf.distribute.OneDeviceStrategy("/cpu:0"), "off")
        for _ in range(STEPS):
            step(next(batches))
        expected = [v.numpy() for v in execution.state(gpu_programs.as_trainer(step))]
        with gpu_programs.pretended(2) as strategy:
            step, batches = make_step(strategy, "step")
            program = gpu_programs.export_step(step, batches, STEPS)
    finally:
        tf_keras.backend.set_floatx("float32")
    found = differ(devices, program, gpu_programs.as_trainer(step), expected)
    assert found[0] < BOUND, found


def test_optimizer_of_another_scope_is_rejected():
    with gpu_programs.pretended(2) as strategy:
        step, batches = make_step(strategy, "step", momentum())
        step.build(next(batches))
        with pytest.raises(ctl.UsageError, match=r"iteration.* outside the strategy's scope"):
            tf.function(step._run, autograph=False).get_concrete_function(next(batches))
