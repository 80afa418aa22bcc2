"""A loop of one's own around `ctl.Step` that is killed by SIGKILL ends with the bits of one that is not.

python -m tests.end_to_end.own_loop_test FOLDER 7    # kills itself after step 7
"""

import os
import pathlib
import signal
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests.support import child

STEPS = 20
BATCH = 7  # 2 replicas have 4 and 3 rows
SAVE_INTERVAL = 3


def build_model():
    return tf_keras.Sequential(
        [
            tf_keras.layers.Dense(6, activation="tanh"),
            ctl.SyncBatchNormalization(),
            tf_keras.layers.Dropout(0.3),
            tf_keras.layers.Dense(2),
        ]
    )


def squared_error(batch, outputs):
    return tf.reduce_mean((batch["label"] - outputs) ** 2, axis=-1)


def main(folder, killed_after):
    """Trains up to `STEPS`, with TensorFlow's manager, and writes all that the next step depends on."""
    folder = pathlib.Path(folder)
    testing.split_cpu(2)
    strategy = testing.make_strategy(2)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(40, n)).astype("float32") for n in (5, 2))
    source = ctl.data.arrays({"x": x, "label": y})
    step = ctl.Step(
        build_model, lambda: tf_keras.optimizers.Adam(1e-2), squared_error,
        global_batch_size=BATCH, strategy=strategy, ema_decay=0.9, seed=3,
    )  # fmt: skip
    step.build(next(iter(ctl.data.distribute(source, BATCH, strategy))))
    checkpoint = tf.train.Checkpoint(**step.state())
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "checkpoints"), max_to_keep=2)
    manager.restore_or_initialize()
    first = int(step.global_step.numpy())
    print("starts at", first, flush=True)
    data = iter(ctl.data.distribute(source, BATCH, strategy, start_step=first))
    for number in range(first + 1, STEPS + 1):
        step(next(data))
        if number == int(killed_after):
            os.kill(os.getpid(), signal.SIGKILL)
        if number % SAVE_INTERVAL == 0:
            manager.save()
    with step.averaged_weights():
        averages = step.model.get_weights()
    values = [*step.model.get_weights(), *averages, *(v.numpy() for v in step.optimizer.variables)]
    np.savez(folder / "values.npz", *values)


def run(folder, killed_after=0):
    """Returns the exit status of a process, and the step at which it began."""
    program = "tests.end_to_end.own_loop_test"
    result = child.run(["-m", program, str(folder), str(killed_after)])
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode, int(result.stdout.split("starts at")[1].split()[0])


@pytest.mark.slow
def test_loop_that_is_killed_ends_with_the_same_bits(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    assert run(tmp_path / "undisturbed") == (0, 0)
    undisturbed = np.load(tmp_path / "undisturbed/values.npz")
    assert [run(tmp_path, killed_after) for killed_after in (11, 0)] == [
        (-signal.SIGKILL, 0),
        (0, 9),
    ]
    killed = np.load(tmp_path / "values.npz")
    assert len(killed.files) > 20
    for name in killed.files:
        np.testing.assert_array_equal(killed[name], undisturbed[name])


if __name__ == "__main__":
    main(*sys.argv[1:])
