"""Steps are scheduled on the workers of a parameter-server strategy."""

import pytest
import tensorflow as tf

from ctl.hardware.coordinator import CoordinatedLoop


class FakeCoordinator:
    """Runs at `join` what was scheduled, as a single worker would."""

    def __init__(self, strategy):
        self.scheduled = []

    def schedule(self, function, args):
        self.scheduled.append((function, args))

    def join(self):
        for function, args in self.scheduled:
            function(*args)
        self.scheduled = []


@pytest.mark.parametrize(
    ("num_steps", "counts"), [(0, []), (3, [3]), (10, [10]), (25, [10, 10, 5])]
)
def test_all_steps_are_scheduled_in_calls_of_at_most_ten_that_are_traced_once(
    monkeypatch, num_steps, counts
):
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", FakeCoordinator)
    steps = tf.Variable(0)
    run_steps = tf.function(lambda iterator, count: steps.assign_add(count))
    loop = CoordinatedLoop(run_steps, strategy=None)
    scheduled = []
    schedule = loop._coordinator.schedule

    def record(function, args):
        scheduled.append(int(args[1]))
        schedule(function, args)

    monkeypatch.setattr(loop._coordinator, "schedule", record)
    loop(iter(tf.data.Dataset.range(1)), tf.constant(num_steps))
    assert scheduled == counts
    assert int(steps) == num_steps
    assert run_steps.experimental_get_tracing_count() == (num_steps > 0)
