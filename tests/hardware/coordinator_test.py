"""Steps are scheduled on the workers of a parameter-server strategy."""

from unittest import mock

import pytest
import tensorflow as tf

from ctl.hardware.coordinator import CoordinatedLoop


@pytest.mark.parametrize(
    ("num_steps", "counts"), [(0, []), (3, [3]), (10, [10]), (25, [10, 10, 5])]
)
def test_all_steps_are_scheduled_in_calls_of_at_most_ten_that_are_traced_once(
    monkeypatch, num_steps, counts
):
    coordinator = mock.Mock()
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", lambda _: coordinator)
    run_steps = tf.function(lambda iterator, count: count)
    CoordinatedLoop(run_steps, strategy=None)(None, tf.constant(num_steps))
    *scheduled, joined = coordinator.method_calls
    assert joined == mock.call.join()
    # As on one worker.
    assert [int(call.args[0](*call.kwargs["args"])) for call in scheduled] == counts
    assert run_steps.experimental_get_tracing_count() == (num_steps > 0)
