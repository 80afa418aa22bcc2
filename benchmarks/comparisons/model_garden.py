"""Model Garden's core (`official.core`) on small cases, next to what a user expects.

    pip install --no-deps --target garden gin-config pyyaml dm-tree immutabledict etils \
        importlib_resources promise toml tqdm dill simple_parsing docstring_parser fsspec \
        tensorflow-metadata tensorflow-datasets tensorflow-hub tensorflow-model-optimization
    PYTHONPATH=garden python -m benchmarks.comparisons.model_garden

Its core imports these packages, of which ctl needs none, so that no test runs this file. The model is
y = w x with w = 1 and the loss the mean of (y - w x)^2; one step of SGD with learning rate 1.
"""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
from official.core import base_task, train_utils
import tensorflow as tf
import tf_keras

from ctl import testing

X = np.array([[1.0], [1.0], [2.0]], np.float32)
Y = np.array([[4.0], [7.0], [8.0]], np.float32)


class Regression(base_task.Task):
    """A task that averages its losses, as those of Model Garden do."""

    def build_inputs(self, params, input_context=None):
        """Not used: the batches are made by hand."""

    def build_losses(self, labels, model_outputs, aux_losses=None):
        """The mean of the squared differences."""
        return tf.reduce_mean(tf.square(labels - model_outputs))


def update(shares: list[slice]) -> float:
    """The update of w by `Task.train_step`, one replica per share of the three examples."""
    strategy = testing.make_strategy(len(shares))
    with strategy.scope():
        layer = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = tf_keras.Sequential([tf_keras.layers.Input([1]), layer])
        optimizer = tf_keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)
    task = Regression(None)

    def distribute(values: np.ndarray) -> tf.distribute.DistributedValues:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[shares[context.replica_id_in_sync_group]])
        )

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        strategy.run(lambda a, b: task.train_step((a, b), model, optimizer), args=(x, y))

    step(distribute(X), distribute(Y))
    return float(layer.kernel.numpy()[0, 0]) - 1


def exports_after_nan() -> list[bool]:
    """Whether the losses NaN, 0.5 and 0.4, in this order, are exported as the best so far."""
    with tempfile.TemporaryDirectory() as folder:
        exporter = train_utils.BestCheckpointExporter(f"{folder}/best", "loss", "lower")
        checkpoint = tf.train.Checkpoint(step=tf.Variable(0))
        losses = enumerate((float("nan"), 0.5, 0.4))
        return [
            exporter.maybe_export_checkpoint(checkpoint, {"loss": tf.constant(loss)}, step)
            for step, loss in losses
        ]


def main() -> None:
    """Prints a table."""
    testing.split_cpu(2)
    print("| case | expected | Model Garden |\n|---|---|---|")
    print(f"| update of w, 3 examples on 1 replica | 14 | {update([slice(0, 3)]):g} |")
    shares = [slice(0, 2), slice(2, 3)]
    print(f"| update of w, 3 examples on 2 replicas | 14 | {update(shares):g} |")
    print(f"| losses NaN, 0.5, 0.4 are the best so far | no, yes, yes | {exports_after_nan()} |")


if __name__ == "__main__":
    main()
