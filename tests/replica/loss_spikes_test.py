"""A loss far above the running median of the last 101."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.errors import NonFiniteStep
from ctl.replica.loss_spikes import WINDOW, LossSpikes
from tests import reference_model
from tests.faulty_trainers import BATCH, jumping, same, state


def told(factor, losses):
    """Which of the losses are spikes."""
    spikes = LossSpikes(factor, dtype=tf.float64)
    seen = tf.function(spikes.is_spike)
    return [bool(seen(tf.constant(loss, tf.float64))) for loss in losses]


def test_a_loss_above_so_many_times_the_median_is_a_spike():
    usual = list(range(1, WINDOW + 1))  # whose median is 51
    assert not any(told(3.0, usual))
    assert told(3.0, [*usual, 153.0])[-1] is False
    assert told(3.0, [*usual, 153.1])[-1] is True


def test_the_median_goes_along():
    usual = [1.0] * WINDOW
    assert not any(told(3.0, [*usual, *np.geomspace(1.0, 50.0, 2000)]))
    stays_high = told(3.0, [*usual, *[9.0] * WINDOW])
    assert stays_high[WINDOW:].index(False) == WINDOW // 2 + 1  # then 9 is the median
    assert not any(stays_high[WINDOW + WINDOW // 2 + 1 :])


def test_nothing_is_told_before_there_are_enough_losses():
    assert not any(told(3.0, [*[1.0] * (WINDOW - 1), 1e9]))


def test_what_is_not_finite_is_not_remembered():
    assert told(3.0, [*[1.0] * (WINDOW - 1), *[np.nan, np.inf] * 9, 1e9]) == [False] * (WINDOW + 18)


def test_a_negative_median():
    usual = [-10.0] * WINDOW
    assert told(3.0, [*usual, 9.9, 10.1])[-2:] == [False, True]


AT = WINDOW + 5
CASES = [(1, "off"), (1, "loop"), (1, "step"), (1, "gradients"), (2, "off"), (4, "gradients")]


@pytest.mark.parametrize(("replicas", "xla"), CASES)
def test_a_spike_is_left_out_on_every_replica(replicas, xla):
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_spike_stops_the_run(replicas):
    trainer = jumping(replicas, AT, loss_spike=5.0)
    with pytest.raises(
        NonFiniteStep, match=f"Step {AT} has a spike of the loss, far above"
    ) as stop:
        trainer.train(tf.constant(AT + 3))
    assert stop.value.step == AT and "on the examples" in str(stop.value)


def test_nobody_looks_unless_asked():
    trainer = jumping(1, AT)
    trainer.train(tf.constant(AT + 3))
    assert trainer.non_finite_report is None


def test_a_spike_under_float16_does_not_touch_the_loss_scale():
    at = AT + 20  # the first steps overflow, until the scale is small enough
    options = {"precision": "float16", "on_non_finite": "skip", "loss_spike": 5.0}
    trainer = jumping(1, at, xla="step", **options)
    trainer.train(tf.constant(at))
    trainer.optimizer._loss_scale._current_loss_scale.assign(8.0)  # the spike is not to overflow
    skipped, scale = trainer.skipped_steps.numpy(), trainer.optimizer.loss_scale.numpy()
    trainer.train(tf.constant(1))
    assert trainer.non_finite_report is not None and trainer.skipped_steps.numpy() == skipped + 1
    assert trainer.optimizer.loss_scale.numpy() == scale


def test_a_step_of_ones_own_is_refused():
    class Own(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return super().replica_step(batch)

    with pytest.raises(ctl.UsageError, match="checks the single loss of ctl's own step"):
        reference_model.make_trainer(testing.make_strategy(1), BATCH, cls=Own, loss_spike=3.0)
