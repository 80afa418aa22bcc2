"""A correct experiment resumes bit for bit; state outside of the checkpoint is detected."""

import pytest

from ctl.modes.check import checkpoint_check
from ctl.modes.check.outcome import FAIL

STATE_IN_NO_CHECKPOINT = """
    def build_model(self):
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.box = lambda: None  # an object that TensorFlow does not track
        self.box.calls = tf.Variable(0.0, trainable=False, aggregation=first)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        self.box.calls.assign_add(1.0)
        return super().per_example_loss(batch, outputs) * self.box.calls
    """


@pytest.mark.slow
def test_a_correct_experiment_passes(assert_passes):
    assert_passes(checkpoint_check.check_round_trip)


def test_state_that_is_in_no_checkpoint_fails(assert_detects):
    check = checkpoint_check.check_round_trip
    assert_detects(STATE_IN_NO_CHECKPOINT, check, FAIL, "variables differ, by up to")
