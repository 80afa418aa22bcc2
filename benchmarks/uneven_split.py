"""One training update on a global batch of 3 examples, split 2 + 1 over two replicas.

Prints, for each program, how one step of plain SGD with learning rate 1 changes the only weight w of
the model y = w * x, next to the correct update:

    python -m benchmarks.uneven_split

Everything is computed when the program runs, on two logical CPU devices with
tf.distribute.MirroredStrategy. Tables go to stdout, everything else to stderr.

The numbers are small enough to check by hand. With w = 1 the errors y - w * x of the three examples
are 3, 6 and 6, and the loss is the mean of their squares over the batch, so the update of w is
2 / 3 * (1 * 3 + 1 * 6 + 2 * 6) = 14.
"""

import contextlib
import functools
import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"  # Read when Keras 3 is imported; tf_keras ignores it.

import keras
import numpy as np
import orbit
from orbit.examples.single_task import single_task_trainer
import tensorflow as tf
import tf_keras

import ctl

X = np.array([[1.0], [1.0], [2.0]], np.float32)
Y = np.array([4.0, 7.0, 8.0], np.float32)
W = 1.0  # The weight before the update.
ROWS_PER_REPLICA = [2, 1]


def true_update() -> float:
    """Returns minus the gradient of the loss over the three examples, computed in numpy."""
    x, y = X[:, 0].astype(np.float64), Y.astype(np.float64)
    return float(np.mean(2 * x * (y - W * x)))


def ctl_update() -> float:
    """`ctl.Step`, which knows the global batch size, but not how it is split."""
    step = ctl.Step(
        lambda: make_model(tf_keras),
        lambda: tf_keras.optimizers.SGD(1.0),
        lambda batch, outputs: squared_error(batch["y"], outputs),
        global_batch_size=3,
        strategy=make_strategy(),
    )
    step(next(iter(step.strategy.experimental_distribute_dataset(named_dataset()))))
    return weight_change(step.model)


def tf_keras_fit_update() -> float:
    """tf_keras `Model.fit`, as in https://www.tensorflow.org/tutorials/distribute/keras."""
    strategy = make_strategy()
    with strategy.scope():
        model = make_model(tf_keras)
        model.compile(optimizer=tf_keras.optimizers.SGD(1.0), loss="mse")
    model.fit(make_dataset(3), epochs=1, shuffle=False, verbose=0)
    return weight_change(model)


def keras_3_fit_update() -> float:
    """Keras 3 `Model.fit`, as in https://keras.io/guides/distributed_training_with_tensorflow.

    It raises an error if the first batch is uneven (see below). So here the three examples follow a
    full batch of 4 zeros, and w is reset to 1 in between: the change is that of the second update.
    """
    model = keras_3_model()
    reset = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: model.set_weights([np.full((1, 1), W)])
    )
    zeros = tf.data.Dataset.from_tensors((np.zeros((4, 1), np.float32), np.zeros(4, np.float32)))
    data = zeros.concatenate(make_dataset(4))
    model.fit(data, epochs=1, shuffle=False, callbacks=[reset], verbose=0)
    return weight_change(model)


def keras_3_fit_first_batch_update() -> float:
    """Keras 3 with the uneven batch first; it then computes the mean of the replicas' inputs."""
    model = keras_3_model()
    model.fit(make_dataset(3), epochs=1, shuffle=False, verbose=0)
    return weight_change(model)


def keras_3_model() -> keras.Model:
    """A compiled Keras 3 model on two replicas."""
    with make_strategy().scope():
        model = make_model(keras)
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss="mse")
    return model


def orbit_example_update() -> float:
    """Orbit's own example trainer, orbit/examples/single_task, run by `orbit.Controller`.

    It divides each replica's mean loss by the number of replicas.
    """
    strategy = make_strategy()
    with strategy.scope():
        model = make_model(tf_keras)
        trainer = single_task_trainer.SingleTaskTrainer(
            train_dataset=strategy.experimental_distribute_dataset(named_dataset()),
            label_key="y",
            model=tf_keras.Model({"x": model.input}, model.output),
            loss_fn=squared_error,
            optimizer=tf_keras.optimizers.SGD(1.0),
        )
    options = {"global_step": trainer.optimizer.iterations, "steps_per_loop": 1}
    orbit.Controller(strategy=strategy, trainer=trainer, **options).train(steps=1)
    return weight_change(model)


def custom_loop_update(global_batch_size: int | None) -> float:
    """One step of the loop of https://www.tensorflow.org/tutorials/distribute/custom_training.

    Its loss is `tf.nn.compute_average_loss` with this global batch size: 4 is a constant, although the
    last batch has 3 rows; 3 is correct, if the caller knows it; None means the rows of the replica times
    the replicas.
    """
    strategy = make_strategy()
    with strategy.scope():
        model = make_model(tf_keras)
        optimizer = tf_keras.optimizers.SGD(1.0)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                squared_error(y, model(x, training=True)), global_batch_size=global_batch_size
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def distributed_train_step(batch):
        strategy.run(train_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(make_dataset(4)):
        distributed_train_step(batch)
    return weight_change(model)


def make_strategy() -> tf.distribute.MirroredStrategy:
    """Creates two replicas on two logical CPU devices; checks that they get 2 and 1 examples."""
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    for batch_size in (3, 4):
        x, _ = next(iter(strategy.experimental_distribute_dataset(make_dataset(batch_size))))
        rows = [len(values) for values in strategy.experimental_local_results(x)]
        if rows != ROWS_PER_REPLICA:
            raise RuntimeError(f"expected {ROWS_PER_REPLICA} examples per replica, got {rows}")
    return strategy


def make_dataset(batch_size: int) -> tf.data.Dataset:
    """Returns the three examples, in order, as one batch; partial if `batch_size` is 4."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)


def named_dataset() -> tf.data.Dataset:
    """Returns the same batch as a dict."""
    return make_dataset(3).map(lambda x, y: {"x": x, "y": y})


def make_model(keras_module):
    """Builds the model y = w * x in tf_keras or Keras 3, with w = 1."""
    initial = keras_module.initializers.Constant(W)
    dense = keras_module.layers.Dense(1, use_bias=False, kernel_initializer=initial)
    return keras_module.Sequential([keras_module.Input((1,), name="x"), dense])


def squared_error(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """The squared error of each example: [rows], not reduced."""
    return tf.square(y - outputs[:, 0])


def weight_change(model) -> float:
    """Returns the difference of w to its initial value."""
    return float(model.trainable_variables[0].numpy()[0, 0]) - W


def main() -> None:
    """Prints every program's update as a markdown table."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print("Mean squared error, 3 examples, split 2 + 1:\n")
    programs = {
        "true update (numpy)": true_update,
        "ctl": ctl_update,
        "tf_keras `model.fit`": tf_keras_fit_update,
        "Keras 3 `model.fit`": keras_3_fit_update,
        "Keras 3 `model.fit`, the uneven batch first": keras_3_fit_first_batch_update,
        "Orbit's example trainer": orbit_example_update,
        **{
            f"`tf.nn.compute_average_loss`, {words}": functools.partial(custom_loop_update, size)
            for words, size in {
                "nominal batch of 4": 4, "actual batch of 3": 3, "no batch size": None
            }.items()
        },
    }  # fmt: skip
    print("| program | update of w | error |")
    print("|---|---:|---:|")
    for program, update in programs.items():
        print(f"| {program} | {' | '.join(cells(update))} |")


def cells(update) -> tuple[str, str]:
    """Formats the update and its relative error, or the name of the error that is raised."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Orbit's controller prints to stdout.
            value = update()
    except tf.errors.InvalidArgumentError as error:
        return f"raises {type(error).__name__}", ""
    relative = value / true_update() - 1
    return f"{value:.4f}", "0" if abs(relative) < 1e-6 else f"{relative:+.1%}"


if __name__ == "__main__":
    main()
