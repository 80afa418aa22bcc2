"""plant makes the losses of one replica at one step non-finite."""

import math

import pytest
import tensorflow as tf

import ctl
from ctl import testing


def test_planted_value_skips_one_step():
    trainer = testing.tiny_trainer(testing.make_strategy(2), on_non_finite="skip")
    with pytest.raises(ctl.UsageError, match="no replica 2: replicas are numbered 0 to 1"):
        testing.plant(trainer, replica=2)
    testing.plant(trainer, math.inf, replica=1, step=1)
    trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    assert trainer.optimizer.iterations.numpy() == 2
    with pytest.raises(ctl.UsageError, match="has already trained"):
        testing.plant(trainer, replica=0)
