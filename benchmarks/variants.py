"""The training loops that are compared. Each trains endlessly and calls `tick(steps)` regularly.

`tick` ends the training by raising an exception. All hand-written loops and fits read the same
tf.data pipeline, that of the tutorials; ctl reads its own.
"""

from collections.abc import Callable
import functools
import importlib
import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # Keras 3 reads it when imported; tf_keras ignores it

import tensorflow as tf
import tf_keras

from benchmarks.models import GPU, Model
import ctl

CTL = "ctl, xla="
RESIDENT = ", data on the device"
KERAS_3 = ", Keras 3"
OWN_LOOP = "ctl.Step, tf.range"
TUTORIAL = "hand-written, one call per step"
LOOP = "hand-written, tf.range"
LOOP_XLA = "hand-written, tf.range, step in XLA"
FITS = ("tf_keras fit", "tf_keras fit, best options", "Keras 3 fit", "Keras 3 fit, best options")
REFERENCES = (LOOP, LOOP_XLA)  # the faster one is the best hand-written loop

Tick = Callable[[int], None]


def run(name: str, model: Model, tick: Tick) -> None:
    """Trains until `tick` raises.

    Args:
        name: name of the variant.
        model: the model to train.
        tick: called with the number of steps since the last call. Its attribute `sync` is set to a
            function that waits until these steps are done on the device.
    """
    if name.startswith(CTL):
        run_ctl(name.removeprefix(CTL), model, tick)
        return
    set_precision(tf_keras, model)
    if name in FITS:
        run_fit(model, tick, keras_3=name.startswith("Keras 3"), best=name.endswith("options"))
    elif name in REFERENCES:
        run_loop(model, tick, jit=name == LOOP_XLA)
    else:
        {OWN_LOOP: run_own_loop, TUTORIAL: run_tutorial}[name](model, tick)


def import_keras(keras_3: bool):
    """Returns Keras 3 or tf_keras."""
    return importlib.import_module("keras") if keras_3 else tf_keras


def set_precision(keras, model: Model) -> None:
    """Sets the global policy of a Keras module; ctl sets its own by `runtime.precision`."""
    if model.precision != "float32":  # an explicit policy would no longer follow `floatx`
        keras.mixed_precision.set_global_policy(f"mixed_{model.precision}")


class Trainer(ctl.StandardTrainer):
    """Trains a benchmark model with ctl."""

    def __init__(self, model: Model, *, dropout: float = 0.5, keras_3: bool = False, **arguments):
        self._benchmark, self._dropout, self._keras_3 = model, dropout, keras_3
        super().__init__(global_batch_size=model.batch, **arguments)

    def build_model(self):
        return self._benchmark.build(import_keras(self._keras_3), self._dropout)

    def build_dataset(self, split, input_context):
        x, y = self._benchmark.arrays()
        return ctl.data.arrays({"x": x, "label": y})

    def per_example_loss(self, batch, outputs):
        return self._benchmark.loss_fn(tf_keras)(batch["label"], outputs)

    def build_metrics(self):
        return self._benchmark.metrics(tf_keras)


def run_ctl(mode: str, model: Model, tick: Tick) -> None:
    keras_3, mode = mode.endswith(KERAS_3), mode.removesuffix(KERAS_3)
    placement = {"placement": "device"} if mode.endswith(RESIDENT) else {}
    xla = mode.removesuffix(RESIDENT)
    options = ctl.TrainerOptions(xla=xla, precision=model.precision, **placement)
    trainer = Trainer(
        model, optimizer=lambda: model.optimizer(tf_keras), options=options, keras_3=keras_3
    )
    tick.sync = make_sync(trainer.model)
    call_endlessly(trainer.train, model, tick)


def call_endlessly(loop: Callable[[tf.Tensor], object], model: Model, tick: Tick) -> None:
    steps = tf.constant(model.steps_per_loop)
    while True:
        loop(steps)
        tick(model.steps_per_loop)


def run_own_loop(model: Model, tick: Tick) -> None:
    """Calls a `ctl.Step` `steps_per_loop` times in one tf.function."""
    loss_fn = model.loss_fn(tf_keras)
    step = ctl.Step(
        lambda: model.build(tf_keras),
        lambda: model.optimizer(tf_keras),
        lambda batch, outputs: loss_fn(batch["label"], outputs),
        global_batch_size=model.batch,
        metrics=model.metrics(tf_keras),
    )
    tick.sync = make_sync(step.model)
    x, y = model.floats()
    iterator = iter(ctl.data.distribute(ctl.data.arrays({"x": x, "label": y}), model.batch))
    step.build(next(iterator))

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            step(next(iterator))

    call_endlessly(functools.partial(loop, iterator), model, tick)


def run_tutorial(model: Model, tick: Tick) -> None:
    """Calls a tf.function once per step."""
    step, tick.sync = make_step(model)
    train_step = tf.function(step)
    for x, y in pipeline(model):
        train_step(x, y)
        tick(1)


def run_loop(model: Model, tick: Tick, *, jit: bool) -> None:
    """Runs `steps_per_loop` steps in one tf.function."""
    step, tick.sync = make_step(model)
    step = tf.function(step, jit_compile=True) if jit else step
    iterator = iter(pipeline(model))

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            step(*next(iterator))

    call_endlessly(functools.partial(loop, iterator), model, tick)


def run_fit(model: Model, tick: Tick, *, keras_3: bool, best: bool) -> None:
    """Runs one long fit; `best` uses many steps per call and, on a GPU, XLA."""
    keras = import_keras(keras_3)
    set_precision(keras, model)
    network = model.build(keras)
    steps = model.steps_per_loop if best else 1
    network.compile(
        optimizer=model.optimizer(keras),
        loss=model.loss_fn(keras),
        metrics=list(model.metrics(keras).values()),
        **({"steps_per_execution": steps} if best else {}),
        **({"jit_compile": True} if best and GPU else {}),
    )
    tick.sync = make_sync(network)

    class Ticking(keras.callbacks.Callback):
        _supports_tf_logs = True  # as in tf_keras' callbacks: logs stay on the device

        def on_train_batch_end(self, batch, logs=None):
            tick(steps)

    network.fit(
        pipeline(model),
        steps_per_epoch=steps * (10**7 // steps),
        callbacks=[Ticking()],
        shuffle=False,  # the pipeline shuffles
        verbose=0,
    )


def make_step(model: Model, network=None, optimizer=None):
    """Returns the train step of TensorFlow's custom training tutorials, and its sync function."""
    network = network or model.build(tf_keras)
    optimizer = optimizer or model.optimizer(tf_keras)
    loss_fn, train_loss = model.loss_fn(tf_keras), tf_keras.metrics.Mean("loss")
    metrics = model.metrics(tf_keras)
    scales = model.precision == "float16"
    if scales:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    optimizer.build(network.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = network(x, training=True)
            loss = tf.reduce_mean(loss_fn(y, outputs))
            scaled = optimizer.get_scaled_loss(loss) if scales else loss
        gradients = tape.gradient(scaled, network.trainable_variables)
        if scales:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
        train_loss.update_state(loss)
        for metric in metrics.values():
            metric.update_state(y, outputs)

    return step, make_sync(network)


def pipeline(model: Model) -> tf.data.Dataset:
    """The pipeline of the tutorials, but endless and with full batches, without a pause per epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(model.floats()).shuffle(10_000).repeat()
    return dataset.batch(model.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def make_sync(network) -> Callable[[], object]:
    """Returns a function that waits for all steps by reading a weight that they update."""
    variables = network.trainable_variables
    return lambda: variables[-1].numpy()
