"""ctl and the hand-written loop compute the same updates."""

from benchmarks import models, same


def test_ctl_and_the_hand_written_loop_end_with_the_same_weights():
    assert same.largest_difference(models.MODELS["empty"]) <= same.TOLERANCE
