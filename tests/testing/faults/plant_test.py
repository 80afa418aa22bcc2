"""A planted value breaks the named replica at the named step."""

import math

import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.errors import NonFiniteStep


@pytest.mark.parametrize(
    "xla",
    [
        "gradients",
        pytest.param("step", marks=pytest.mark.slow),
        pytest.param("loop", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_same_step_in_every_mode_of_xla(xla):
    trainer = testing.tiny_trainer(testing.make_strategy(1), xla=xla)
    testing.plant(trainer, step=5)
    trainer.train(tf.constant(5))
    with pytest.raises(NonFiniteStep) as raised:
        trainer.train(tf.constant(5))
    assert raised.value.step == 5


@pytest.mark.parametrize(
    ("value", "replica"), [pytest.param(math.nan, 0, marks=pytest.mark.slow), (math.inf, 1)]
)
def test_planted_value_skips_one_step(value, replica):
    trainer = testing.tiny_trainer(testing.make_strategy(2), on_non_finite="skip")
    testing.plant(trainer, value, replica=replica, step=1)
    trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    assert trainer.optimizer.iterations.numpy() == 2
    with pytest.raises(ctl.UsageError, match="has already trained"):
        testing.plant(trainer, replica=0)


def test_plant_on_a_replica_that_does_not_exist_is_an_error():
    with pytest.raises(ctl.UsageError, match="no replica 2: replicas are numbered 0 to 1"):
        testing.plant(testing.tiny_trainer(testing.make_strategy(2)), replica=2)
