"""Whether the update of a step is that of one replica on logical GPUs, bit for bit where it must be."""

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.gpu import devices
from benchmarks.gpu.parts import Report
import ctl
from ctl import testing

_L = tf_keras.layers
_REPLICAS = (1, 2, 4)
_NORMAL_TOLERANCE = 1e-4  # of numbers up to 6 in float32


class Trainer(ctl.StandardTrainer):
    """A small network with convolutions, synchronized batch normalization and dropout."""

    normalized = True

    def build_model(self):
        norm = [ctl.SyncBatchNormalization()] if self.normalized else []
        layers = [_L.Conv2D(8, 3), *norm, _L.Activation("tanh"), _L.Flatten()]
        return tf_keras.Sequential([_L.Input((8, 8, 3)), *layers, _L.Dropout(0.4), _L.Dense(5)])

    def build_dataset(self, split, input_context):
        draw = np.random.default_rng(0)
        scale = draw.uniform(0.1, 3, [50, 1, 1, 1])  # examples that differ in size
        x = (draw.normal(size=[50, 8, 8, 3]) * scale).astype(np.float32)
        return ctl.data.arrays({"x": x, "label": draw.integers(0, 5, 50).astype(np.int32)})

    def preprocess(self, batch):
        return {**batch, "x": tf.cast(batch["x"], self.compute_dtype)}

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )


class Plain(Trainer):
    """Without batch normalization."""

    normalized = False


def check_equivalence(report: Report) -> None:
    """float64: 1, 2 and 4 logical GPUs against one replica on the CPU, which has the same masks."""
    devices.split(4)
    steps = 3 if report.small else 50
    for batch in (8, 7):
        reference = _train(devices.make_strategy(1, kind="CPU"), batch, steps, precision="float64")
        for replicas in _REPLICAS:
            name = f"{replicas} {devices.KIND}, {steps} steps, batch {batch}"
            with report.attempt(name):
                strategy = devices.make_strategy(replicas)
                trainer = _train(strategy, batch, steps, precision="float64")
                _report_difference(report, name, trainer, reference, 1e-10)
    with report.attempt("2 micro-batches"):
        options = {"cls": Plain, "precision": "float64"}
        trainer = _train(devices.make_strategy(2), 8, steps, micro_batches=2, **options)
        reference = _train(devices.make_strategy(1, kind="CPU"), 8, steps, **options)
        _report_difference(report, "2 micro-batches", trainer, reference, 1e-10)


def check_overflow(report: Report) -> None:
    """float16: infinite losses of one replica skip the step on every replica."""
    devices.split(4)
    for replicas in (1,) if report.small else _REPLICAS:
        for bad in sorted({0, replicas - 1}):
            name = f"{replicas} {devices.KIND}, replica {bad} overflows"
            with report.attempt(name):
                strategy = devices.make_strategy(replicas)
                # A scale that fits from the first step on, so that only the planted step overflows.
                trainer = _train(strategy, 8, 5, bad=bad, precision="float16", scale=64.0)
                skipped = int(trainer.skipped_steps.numpy())
                scale = float(trainer.optimizer.loss_scale)
                same = _copies_are_equal(trainer)
                finite = all(np.isfinite(w).all() for w in trainer.model.get_weights())
                right = skipped == 1 and scale == 32.0 and same and finite
                report(
                    name,
                    skipped_steps=skipped,
                    loss_scale=scale,
                    copies_are_equal=same,
                    weights_are_finite=finite,
                    iterations=int(trainer.optimizer.inner_optimizer.iterations.numpy()),
                    **_verdict(right),
                )


def check_dropout(report: Report) -> None:
    """The random numbers of a GPU are those of the CPU, with and without XLA.

    The bits of uniform numbers are the same. Normal numbers are computed from them by functions such as
    the logarithm, which each device rounds in its own way.
    """

    def draw():
        return ctl.random.uniform([64, 37]), tf.cast(ctl.random.normal([64, 37]), tf.float32)

    with tf.device("CPU:0"):
        expected = [value.numpy() for value in draw()]
    for jit in (False, True):
        name = f"{devices.KIND}{', XLA' * jit}"
        with report.attempt(name), tf.device(f"{devices.KIND}:0"):
            uniform, normal = (value.numpy() for value in tf.function(draw, jit_compile=jit)())
            same = bool(np.array_equal(uniform, expected[0]))
            difference = float(np.abs(normal - expected[1]).max())
            report(
                name,
                same_uniform_bits=same,
                normal_difference=difference,
                **_verdict(same and difference < _NORMAL_TOLERANCE),
            )


def check_logical_shards(report: Report) -> None:
    """float32 with `runtime.logical_shards`: the same bits on 1, 2 and 4 replicas."""
    devices.split(4)
    tf.config.experimental.enable_op_determinism()
    steps = 3 if report.small else 50
    trainers = {}
    for replicas in _REPLICAS:
        with report.attempt(f"{replicas} {devices.KIND}"):
            strategy = devices.make_strategy(replicas)
            trainers[replicas] = _train(strategy, 8, steps, cls=Plain, logical_shards=4)
            name = f"{replicas} {devices.KIND}, {steps} steps"
            _report_difference(report, name, trainers[replicas], trainers[1], 0.0)


def _train(strategy, batch, steps, *, cls=Trainer, scale=None, bad=None, **options) -> Trainer:
    """Trains; the losses of the replica `bad` are infinite at step 2."""

    def make_optimizer():
        adam = tf_keras.optimizers.Adam(1e-2)
        if scale is None:
            return adam
        return tf_keras.mixed_precision.LossScaleOptimizer(adam, initial_scale=scale)

    trainer = cls(
        strategy=strategy,
        global_batch_size=batch,
        optimizer=make_optimizer,
        options=ctl.TrainerOptions(**options),
    )
    if bad is not None:
        testing.plant(trainer, np.inf, replica=bad, step=2)
    trainer.train(tf.constant(steps))
    return trainer


def _variables(trainer: Trainer) -> list[tf.Variable]:
    return [*trainer.model.variables, *trainer.optimizer.variables]


def _report_difference(
    report: Report, name: str, trainer: Trainer, reference: Trainer, tolerance: float
) -> None:
    difference = _largest_difference(trainer, reference)
    report(name, largest_difference=difference, **_verdict(difference <= tolerance))


def _largest_difference(trainer: Trainer, reference: Trainer) -> float:
    """The largest difference of any replica's copy of a weight or slot variable; inf if one is NaN."""
    largest = 0.0
    for one, other in zip(_variables(trainer), _variables(reference), strict=True):
        for copy in testing.copies(trainer.strategy, one):
            value = testing.copies(reference.strategy, other)[0]
            largest = np.maximum(largest, np.abs(copy - value).max(initial=0.0))  # keeps NaN
    return float(largest) if np.isfinite(largest) else float("inf")


def _copies_are_equal(trainer: Trainer) -> bool:
    groups = (testing.copies(trainer.strategy, v) for v in _variables(trainer))
    return all(np.array_equal(each, copies[0]) for copies in groups for each in copies)


def _verdict(right: bool) -> dict[str, object]:
    """The key that makes a wrong result a failure of the run."""
    return {"right": True} if right else {"error": "the result is wrong"}
