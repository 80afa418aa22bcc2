"""Proximal policy optimization of a cart that balances a pole (Schulman et al. 2017, arXiv:1707.06347).

A row of a batch is an episode, which the current policy plays in `preprocess`. The dynamics are those of
Barto, Sutton and Anderson 1983, with the numbers of gymnasium's CartPole-v1. The initial state and the
random numbers of the actions are keyed by the row, so that the episodes do not depend on the number of
replicas, and a resumed run plays the same ones.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

_DISCOUNT, _LAMBDA = 0.99, 0.95  # of generalized advantage estimation (arXiv:1506.02438)
_CLIP = 0.2  # of the ratio of probabilities


class PpoTrainer(ctl.StandardTrainer):
    """Plays one episode per row, and makes several updates with the same episodes."""

    def build_model(self):
        layers, width = tf_keras.layers, self.options.model.width
        x = tf_keras.Input([4])
        outputs = []
        for _ in range(2):  # the logit of a push to the right, and the expected return
            y = layers.Dense(width, activation="tanh")(x)
            y = layers.Dense(width, activation="tanh")(y)
            outputs.append(layers.Dense(1, kernel_initializer="zeros")(y))
        return tf_keras.Model(x, tf.concat(outputs, axis=1))

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"episode": np.arange(1000 if split == "train" else 100)})

    def preprocess(self, batch):
        limit = self.options.model.limit
        start = ctl.random.uniform([None, 4], -0.05, 0.05, self.compute_dtype, name="start")
        unit = ctl.random.uniform([None, limit], dtype=self.compute_dtype, name="action")
        alive = tf.ones_like(start[:, 0])

        def play(carry, unit):
            state, alive = carry[:2]
            logit, value = tf.unstack(self.model(state), axis=1)
            action = tf.cast(unit < tf.sigmoid(logit), state.dtype)
            after = move(state, action)
            return after, alive * is_upright(after), state, alive, action, logit, value

        zero = tf.zeros_like(alive)
        carry = (start, alive, start, alive, zero, zero, zero)
        episodes = tf.scan(play, tf.transpose(unit), carry)  # [steps, rows, ...]
        episodes = [tf.stop_gradient(tf.experimental.numpy.swapaxes(v, 0, 1)) for v in episodes]
        _, lasts, state, weight, action, logit, value = episodes
        # Rewards are 1 for each step. There is no value after the end of an episode.
        following = lasts * tf.pad(value[:, 1:], [[0, 0], [0, 1]])
        delta = weight * (1 + _DISCOUNT * following - value)
        later = np.arange(limit) - np.arange(limit)[:, np.newaxis]
        decay = np.where(later >= 0, (_DISCOUNT * _LAMBDA) ** np.maximum(later, 0), 0)
        advantage = tf.matmul(delta, tf.constant(decay, delta.dtype), transpose_b=True)
        return {
            "state": state,
            "action": action,
            "weight": weight,
            "log_probability": log_probability(logit, action),
            "return": advantage + value,
            "advantage": normalize(advantage, weight),
        }

    def forward(self, batch, training):
        outputs = self.model(tf.reshape(batch["state"], [-1, 4]), training=training)
        return tf.reshape(outputs, [-1, self.options.model.limit, 2])

    def per_example_loss(self, batch, outputs):  # [rows, steps], weighted by batch["weight"]
        logit, value = tf.unstack(outputs, axis=2)
        log_ratio = log_probability(logit, batch["action"]) - batch["log_probability"]
        ratio = tf.exp(log_ratio * batch["weight"])
        clipped = tf.clip_by_value(ratio, 1 - _CLIP, 1 + _CLIP)
        gain = tf.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
        return -gain + 1e-3 * (value - batch["return"]) ** 2

    def replica_step(self, batch):
        self.update_metrics(self.metrics, batch, None, ctl.replica.present())
        for _ in range(self.options.model.updates):
            loss = self.minimize(
                batch, lambda rows: self.per_example_loss(rows, self.forward(rows, training=True))
            )
        return loss

    def build_metrics(self):
        return {"steps": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["steps"].update_state(tf.reduce_sum(batch["weight"], axis=1), weights)


def move(state, action):
    """The state after 0.02 seconds of a push to the left (0) or to the right (1)."""
    _, speed, angle, turn = tf.unstack(state, axis=1)
    sine, cosine = tf.sin(angle), tf.cos(angle)
    force = (20 * action - 10 + 0.05 * turn**2 * sine) / 1.1
    acceleration = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    push = force - 0.05 * acceleration * cosine / 1.1
    change = tf.stack([speed, push, turn, acceleration], axis=1)
    return state + 0.02 * change


def is_upright(state):
    """1 while the cart is on its track and the pole within 12 degrees, otherwise 0; [rows]."""
    limits = tf.constant([2.4, np.inf, 12 * np.pi / 180, np.inf], state.dtype)
    return tf.cast(tf.reduce_all(tf.abs(state) <= limits, axis=1), state.dtype)


def log_probability(logit, action):
    return -tf.nn.sigmoid_cross_entropy_with_logits(labels=action, logits=logit)


def normalize(values, weights):
    """Shifts and scales [rows, steps] by the mean and deviation of the global batch."""
    every, weight = ctl.replica.all_gather((values, weights))
    mean = tf.reduce_sum(every * weight) / tf.reduce_sum(weight)
    variance = tf.reduce_sum((every - mean) ** 2 * weight) / tf.reduce_sum(weight)
    return (values - mean) / (tf.sqrt(variance) + 1e-6)
