"""A loss that is far above the median of the last 101 losses is a spike."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.errors import NonFiniteStep
from ctl.update.non_finite import WINDOW, LossSpikes
from tests.support.faulty_trainers import jumping, same, state


def find_spikes(factor, losses):
    """Whether each of the losses is a spike."""
    spikes = LossSpikes(factor, dtype=tf.float64)
    is_spike = tf.function(spikes.is_spike)
    return [bool(is_spike(tf.constant(loss, tf.float64))) for loss in losses]


def test_loss_above_factor_times_the_median_is_a_spike():
    usual = list(range(1, WINDOW + 1))  # the median is 51
    assert not any(find_spikes(3.0, usual))
    assert find_spikes(3.0, [*usual, 153.0])[-1] is False
    assert find_spikes(3.0, [*usual, 153.1])[-1] is True


def test_median_follows_the_losses():
    usual = [1.0] * WINDOW
    assert not any(find_spikes(3.0, [*usual, *np.geomspace(1.0, 50.0, 600)]))
    stays_high = find_spikes(3.0, [*usual, *[9.0] * WINDOW])
    assert stays_high[WINDOW:].index(False) == WINDOW // 2 + 1  # then 9 is the median
    assert not any(stays_high[WINDOW + WINDOW // 2 + 1 :])


def test_no_loss_is_a_spike_before_the_window_is_full_of_finite_ones():
    assert find_spikes(3.0, [*[1.0] * (WINDOW - 1), *[np.nan, np.inf] * 9, 1e9]) == [False] * (
        WINDOW + 18
    )


def test_spike_above_a_negative_median():
    usual = [-10.0] * WINDOW
    assert find_spikes(3.0, [*usual, 9.9, 10.1])[-2:] == [False, True]


AT = 11 + 5


@pytest.mark.parametrize(
    ("replicas", "xla"), [(2, "off"), pytest.param(1, "loop", marks=pytest.mark.slow)]
)
def test_spike_is_skipped_on_every_replica(small_window, replicas, xla):
    options = {"xla": xla, "on_non_finite": "skip", "loss_spike": 5.0}
    trainer = jumping(replicas, AT, **options)
    trainer.train(tf.constant(AT))
    assert trainer.non_finite_report is None
    before = state(trainer)
    outputs = trainer.train(tf.constant(1))
    same(state(trainer), before)
    assert (trainer.non_finite_report.step, trainer.non_finite_report.count) == (AT, 1)
    assert str(trainer.non_finite_report) == "has a spike of the loss, far above the running median"
    assert outputs["skipped_steps"] == 1
    trainer.train(tf.constant(1))
    assert trainer.non_finite_report is None and trainer.optimizer.iterations.numpy() == AT + 1


def test_spike_stops_a_run_that_checks_for_them(small_window):
    unchecked = jumping(1, AT)
    unchecked.train(tf.constant(AT + 3))
    assert unchecked.non_finite_report is None
    trainer = jumping(1, AT, loss_spike=5.0)
    with pytest.raises(
        NonFiniteStep, match=f"Step {AT} has a spike of the loss, far above"
    ) as stop:
        trainer.train(tf.constant(AT + 3))
    assert stop.value.step == AT and "on the examples" in str(stop.value)


@pytest.mark.slow
def test_spike_under_float16_does_not_change_the_loss_scale(small_window):
    at = AT + 20  # the first steps overflow, until the scale is small enough
    options = {"precision": "float16", "on_non_finite": "skip", "loss_spike": 5.0}
    trainer = jumping(1, at, xla="step", **options)
    trainer.train(tf.constant(at))
    trainer.optimizer._loss_scale._current_loss_scale.assign(
        8.0
    )  # so that the spike does not overflow
    skipped, scale = trainer.skipped_steps.numpy(), trainer.optimizer.loss_scale.numpy()
    trainer.train(tf.constant(1))
    assert trainer.non_finite_report is not None and trainer.skipped_steps.numpy() == skipped + 1
    assert trainer.optimizer.loss_scale.numpy() == scale
