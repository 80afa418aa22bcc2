"""The models in `model.fit` with its best options.

python -m benchmarks.peers.keras_fit tf_keras|tensorflow|jax TASK

The first argument is "tf_keras", or the backend of Keras 3.
"""

import importlib
import os

import numpy as np

from benchmarks.peers import keras_models
from benchmarks.peers.task import run


def train(task, tick, backend):
    if backend == "tf_keras":
        keras = importlib.import_module("tf_keras")
    else:
        os.environ["KERAS_BACKEND"] = backend
        keras = importlib.import_module("keras")
    model = keras_models.build(keras, task)
    model.compile(
        optimizer=keras_models.optimizer(keras, task),
        loss=keras_models.loss_fn(keras, task),
        metrics=keras_models.metrics(keras, task),
        steps_per_execution=task.steps_per_loop,
        jit_compile=backend == "jax",  # XLA is slower than TensorFlow's kernels on a CPU
    )

    class Ticking(keras.callbacks.Callback):
        _supports_tf_logs = True  # as in tf_keras' callbacks: logs stay on the device

        def on_epoch_begin(self, epoch, logs=None):
            self.steps, self.total = 0, 0.0

        def on_train_batch_end(self, batch, logs=None):
            def read_loss():  # `logs` has the mean since the start of the epoch
                total, self.total = self.total, float(logs["loss"]) * self.steps
                return (self.total - total) / task.steps_per_loop

            self.steps += task.steps_per_loop
            tick.sync = read_loss
            tick(task.steps_per_loop)

    if backend == "jax":
        examples = task.floats()
        x, y = examples.get("x", examples), examples.get("label")
        if y is None:  # of two_tower, whose outputs are losses
            y = np.zeros(len(examples["item"]))
        data = dict(x=x, y=y, batch_size=task.batch, shuffle=not task.check)
    else:
        from benchmarks.peers.tensorflow_data import dataset

        data = dict(x=dataset(task), steps_per_epoch=task.steps_per_loop * 1000)
    model.fit(**data, epochs=10**9, callbacks=[Ticking()], verbose=0)


if __name__ == "__main__":
    run(train)
