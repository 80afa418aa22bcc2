"""Numbers that Python and numpy draw while a step is traced are rejected."""

import random

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.checks.python_random import check_host_random
from tests.users_code import running
from tests.users_code.examples import CLASSES, Case
from tests.users_code.running import Split

GLOBAL = np.random.default_rng(0)


def draw_from_global():
    return GLOBAL.normal()


class Noisy(tf_keras.layers.Layer):
    def __init__(self):
        super().__init__(name="noisy")
        self.rng = np.random.RandomState(1)

    def call(self, inputs):
        return inputs + self.rng.normal()


def case(draw, model=None):
    class Drawing(Case):
        def __init__(self, **arguments):
            self.generators = {"own": np.random.default_rng(2), "python": random.Random(3)}
            super().__init__(**arguments)

        def build_model(self):
            return model() if model else super().build_model()

        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, outputs) * (1 + abs(draw(self)))

    return Drawing


REJECTED = {
    "Python's random": case(lambda self: random.random()),
    "numpy.random": case(lambda self: np.random.rand()),
    "GLOBAL": case(lambda self: draw_from_global()),
    "self.generators": case(lambda self: self.generators["own"].normal()),
    "noisy.rng": case(
        lambda self: 0, lambda: tf_keras.Sequential([Noisy(), tf_keras.layers.Dense(CLASSES)])
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_numbers_that_are_drawn_while_the_step_is_traced_are_rejected(name):
    message = rf"draws from {name}, which happens once, .* ctl\.random.* allow_unkeyed_random=True"
    with pytest.raises(ctl.UsageError, match=message):
        running.build(REJECTED[name], Split(2 if name == "GLOBAL" else 1)).train(tf.constant(1))


def test_they_are_accepted_by_an_option():
    accepting = REJECTED["self.generators"](
        global_batch_size=4,
        optimizer=running.OPTIMIZER,
        options=ctl.TrainerOptions(precision="float64", allow_unkeyed_random=True),
    )
    accepting.train(tf.constant(1))


def test_layers_that_a_step_makes_are_accepted():
    class Makes(Case):
        def per_example_loss(self, batch, outputs):
            dropped = tf_keras.layers.Dropout(0.5)(outputs, training=True)
            return super().per_example_loss(batch, dropped)

    # The threads of replicas have no generator of seeds of their own.
    running.build(Makes, Split(2)).train(tf.constant(1))


def test_generators_of_the_dataset_may_be_drawn_from():
    class Trainer:
        def build_dataset(self, split, input_context):
            return GLOBAL.normal()

    with check_host_random(Trainer()):
        GLOBAL.normal()
