"""Loops around `ctl.Step` that are killed by SIGKILL end with the bits of loops that are not.

python -m tests.end_to_end.killed_ports_test SoftActorCritic FOLDER 7    # kills itself after update 7
"""

import functools
import os
import pathlib
import signal
import sys
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests.end_to_end import ported_loops_test
from tests.support import child

BATCH = 7  # 2 replicas have 4 and 3 rows
UPDATES, SAVE_INTERVAL, KILLED_AFTER = 13, 3, 8
LONG = pytest.mark.long
layers, Adam = tf_keras.layers, tf_keras.optimizers.Adam


class Plain:
    """A loop of one's own on data in the order of ctl, with TensorFlow's manager of checkpoints."""

    def __init__(self, strategy):
        rng = np.random.default_rng(0)
        x, y = (rng.normal(size=(40, n)).astype("float32") for n in (5, 2))
        self.source, self.strategy = ctl.data.arrays({"x": x, "label": y}), strategy
        self.update = ctl.Step(
            self.build_model, lambda: Adam(1e-2), self.squared_error,
            global_batch_size=BATCH, strategy=strategy, ema_decay=0.9, seed=3,
        )  # fmt: skip
        self.steps = [self.update]

    def build_model(self):
        norm = ctl.SyncBatchNormalization()
        dropout = layers.Dropout(0.3)
        return tf_keras.Sequential([layers.Dense(6, "tanh"), norm, dropout, layers.Dense(2)])

    def squared_error(self, batch, outputs):
        return tf.reduce_mean((batch["label"] - outputs) ** 2, axis=-1)

    def batches(self):
        step = int(self.update.global_step.numpy())
        return ctl.data.distribute(self.source, BATCH, self.strategy, start_step=step)

    def checkpoints(self, folder):
        """Returns what restores the newest checkpoint, and what saves one."""
        checkpoint = tf.train.Checkpoint(**self.update.state())
        manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
        return manager.restore_or_initialize, manager.save


class Port:
    """A port of a public loop of several models, with ctl's checkpoints."""

    extra: ClassVar = {}

    def checkpoints(self, folder):
        checkpoints = ctl.Checkpointer(folder, self.steps, extra=self.extra)
        return checkpoints.all_restore_latest, checkpoints.save


class Buffer:
    """The transitions of earlier episodes, on the host."""

    def __init__(self):
        self.rng, self.states = np.random.default_rng(0), np.zeros([0, 3])

    def sample(self):
        return self.states[self.rng.integers(len(self.states), size=BATCH)]

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "states": self.states}

    def load_state_dict(self, state):
        self.rng.bit_generator.state, self.states = state["rng"], state["states"]


class SoftActorCritic(Port):
    """github.com/keiohta/tf2rl: three optimizers of one pass, a target network, a replay buffer."""

    def __init__(self, strategy):
        with strategy.scope():
            self.actor = tf_keras.Sequential(
                [layers.Dense(4, "tanh", input_shape=[3]), layers.Dense(2)]
            )
            self.critic, self.target = (
                tf_keras.Sequential([layers.Dense(4, "tanh", input_shape=[4]), layers.Dense(1)])
                for _ in range(2)
            )
            self.log_alpha = tf.Variable(0.1, name="log_alpha")
            optimizers = {
                "actor": (self.actor, Adam(0.01)),
                "critic": (self.critic, Adam(0.02)),
                "alpha": ([self.log_alpha], Adam(0.03)),
            }
        self.strategy = strategy
        self.step = ctl.Step(
            self.actor, optimizers, self.losses, forward=self.forward, models=[self.target],
            transform_gradients=self.add_noise, global_batch_size=BATCH, strategy=strategy,
        )  # fmt: skip
        self.steps, self.extra = [self.step], {"buffer": Buffer()}

    def forward(self, batch, training):
        mean, log_std = tf.split(self.actor(batch["x"], training=training), 2, axis=1)
        with ctl.random.keyed():
            noise = tf.random.normal(tf.shape(mean))
        action = tf.tanh(mean + tf.exp(log_std) * noise)
        return action, tf.reduce_sum(-0.5 * noise**2 - log_std, axis=1)

    def losses(self, batch, outputs):
        action, log_probability = outputs
        inputs = tf.concat([batch["x"], action], axis=1)
        value, alpha = self.critic(inputs)[:, 0], tf.stop_gradient(tf.exp(self.log_alpha))
        target = tf.stop_gradient(self.target(inputs)[:, 0] - alpha * log_probability)
        return {
            "actor": alpha * log_probability - value,
            "critic": (value - tf.reduce_sum(batch["x"], axis=1) - 0.9 * target) ** 2,
            "alpha": -self.log_alpha * tf.stop_gradient(log_probability - 1.0),
        }

    def add_noise(self, gradients, variables):
        return [g + 0.01 * ctl.random.normal(g.shape, shared=True) for g in gradients]

    def batches(self):
        buffer = self.extra["buffer"]
        while True:
            new = buffer.rng.normal(size=[3, 2])
            action = self.actor(np.pad(new, [[0, 0], [0, 1]]).astype("float32"))[:, :1]
            buffer.states = np.concatenate([buffer.states, np.concatenate([new, action], 1)])[-20:]
            data = tf.data.Dataset.from_tensors({"x": buffer.sample().astype("float32")})
            yield next(iter(self.strategy.experimental_distribute_dataset(data)))

    def update(self, batch):
        self.step(batch, when={"actor": self.step.global_step % 2 == 0})
        for variable, new in zip(self.target.variables, self.critic.variables, strict=True):
            variable.assign(0.9 * variable + 0.1 * new)


class Dcgan(Port):
    """The DCGAN with gradient penalty: two steps in one function, noise with batch normalization."""

    def __init__(self, strategy):
        tf_keras.backend.set_floatx("float64")
        with strategy.scope():
            self.loop = ported_loops_test.Dcgan(ctl.SyncBatchNormalization)
        self.steps = ported_loops_test.make_steps(self.loop, strategy, BATCH)
        self.strategy = strategy

    def batches(self):
        images = {"image": ported_loops_test.IMAGES}
        data = tf.data.Dataset.from_tensor_slices(images).repeat().batch(BATCH)
        data = data.skip(int(self.steps[0].global_step.numpy()))
        return self.strategy.experimental_distribute_dataset(data)

    @functools.cached_property
    def update(self):
        critic, generator = self.steps

        @tf.function
        def train(batch):
            critic(batch)
            generator(batch, when=generator.global_step % 3 == 2)  # n_critic

        return train


def main(kind, folder, killed_after):
    """Trains up to `UPDATES`, and writes all that the next one depends on."""
    folder = pathlib.Path(folder)
    testing.split_cpu(2)
    tf_keras.utils.set_random_seed(0)
    port = globals()[kind](testing.make_strategy(2))
    for step in port.steps:
        step.build(next(iter(port.batches())))
    restore, save = port.checkpoints(folder / "checkpoints")
    restore()
    first = int(port.steps[0].global_step.numpy())
    print("starts at", first, flush=True)
    for number, batch in zip(range(first + 1, UPDATES + 1), port.batches(), strict=False):
        port.update(batch)
        if number == int(killed_after):
            os.kill(os.getpid(), signal.SIGKILL)
        if number % SAVE_INTERVAL == 0:
            save()
    states = [tf.train.Checkpoint(**step.state()) for step in port.steps]
    path = tf.train.Checkpoint(steps=states).save(str(folder / "values"))
    values = tf.train.load_checkpoint(path)
    names = [name for name in values.get_variable_to_shape_map() if "OBJECT" not in name]
    np.savez(folder / "values.npz", **{name: values.get_tensor(name) for name in names})


def run(kind, folder, killed_after=0):
    """Returns the exit status of a process, and the update at which it began."""
    program = "tests.end_to_end.killed_ports_test"
    result = child.run(["-m", program, kind, str(folder), str(killed_after)])
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    assert "cannot check" not in result.stderr
    return result.returncode, int(result.stdout.split("starts at")[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["Plain", *(pytest.param(kind, marks=LONG) for kind in ("SoftActorCritic", "Dcgan"))]
)
def test_loop_that_is_killed_ends_with_the_same_bits(kind, tmp_path):
    (tmp_path / "undisturbed").mkdir()
    assert run(kind, tmp_path / "undisturbed") == (0, 0)
    undisturbed = np.load(tmp_path / "undisturbed/values.npz")
    killed = [run(kind, tmp_path, killed_after) for killed_after in (KILLED_AFTER, 0)]
    assert killed == [(-signal.SIGKILL, 0), (0, 6)]
    killed = np.load(tmp_path / "values.npz")
    assert sorted(killed.files) == sorted(undisturbed.files) and len(killed.files) > 20
    for name in killed.files:
        np.testing.assert_array_equal(killed[name], undisturbed[name])


if __name__ == "__main__":
    main(*sys.argv[1:])
