"""The models in ctl: `python -m benchmarks.peers.ctl_loop off TASK`, with a mode of `runtime.xla`."""

import tensorflow as tf
import tf_keras

from benchmarks.peers import keras_models
from benchmarks.peers.task import run
import ctl


class Trainer(ctl.StandardTrainer):
    """Trains the model of a task."""

    def __init__(self, task, **arguments):
        self._task = task
        super().__init__(
            global_batch_size=task.batch,
            optimizer=lambda: keras_models.optimizer(tf_keras, task),
            **arguments,
        )

    def build_model(self):
        # The loss of two_tower needs the vectors of all replicas, and no losses from the model.
        make = keras_models.towers if self._task.name == "two_tower" else None
        return keras_models.build(tf_keras, self._task, make)

    def build_dataset(self, split, input_context):
        if self._task.check:  # a tf.data.Dataset keeps its own order
            return tf.data.Dataset.from_tensor_slices(self._task.arrays)
        return ctl.data.arrays(self._task.arrays)

    def per_example_loss(self, batch, outputs):
        if self._task.name == "two_tower":
            user, item = outputs
            everyone = ctl.replica.all_gather((item, batch["item"]))
            math = keras_models.operations(tf_keras)
            return keras_models.pair_losses(math, user, item, batch["item"], *everyone)
        losses = keras_models.loss_fn(tf_keras, self._task)(batch["label"], outputs)
        return losses if losses.shape.rank == 1 else tf.reduce_mean(losses, axis=1)  # of the bytes

    def build_metrics(self):
        return {metric.name: metric for metric in keras_models.metrics(tf_keras, self._task)}


def train(task, tick, xla):
    trainer = Trainer(task, options=ctl.TrainerOptions(xla=xla))
    steps = tf.constant(task.steps_per_loop)
    while True:
        outputs = trainer.train(steps)
        tick.sync = lambda outputs=outputs: float(outputs["loss"])
        tick(task.steps_per_loop)


if __name__ == "__main__":
    run(train)
