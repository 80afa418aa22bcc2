"""Python code that gives each replica, or each micro-batch, another loss is rejected."""

import pytest
import tensorflow as tf

import ctl
from ctl.replica.arithmetic.trace import MicroBatchTrace, Trace, UpdateTrace
from ctl.replica.checks.loss_trace import compare_micro_batches
from ctl.replica.graphs import order
from tests.users_code.examples import Case
from tests.users_code.running import Split, difference, train
from tests.users_code.state import PythonCounter


class Doubled(Case):
    """Another op in every second trace."""

    traces = 0

    def per_example_loss(self, batch, outputs):
        self.traces += 1
        losses = super().per_example_loss(batch, outputs)
        return tf.exp(losses) if self.traces % 2 else losses


class InBranch(Case):
    """A counter in a branch of a conditional."""

    traces = 0

    def per_example_loss(self, batch, outputs):
        self.traces += 1
        factor = 1.0 / self.traces
        losses = super().per_example_loss(batch, outputs)
        return tf.cond(self.global_step < 100, lambda: factor * losses, lambda: losses)


class OwnPositions(Case):
    """Reads where the replica's rows are, which differs between replicas."""

    def per_example_loss(self, batch, outputs):
        context = tf.distribute.get_replica_context()
        count = outputs.shape[0]
        own = context.replica_id_in_sync_group * count + tf.range(count)
        return tf.cast(own >= 0, outputs.dtype) * super().per_example_loss(batch, outputs)


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (PythonCounter, Split(2)),
        (PythonCounter, Split(1, micro_batches=2)),
        (Doubled, Split(2)),
        (InBranch, Split(1, micro_batches=2)),
    ],
)
def test_state_of_python_is_rejected_with_its_line(case, split):
    with pytest.raises(ctl.UsageError) as raised:
        train(case, split)
    message = str(raised.value)
    assert message.startswith("tests/") and "self.global_step" in message
    assert ("replicas" if split.replicas > 1 else "micro-batches") in message


def test_positions_and_numbers_of_the_rows_may_differ():
    unequal = Split(2, 5, micro_batches=2)  # micro-batches of 1 and 2 rows, then of 1 and 1
    expected = train(OwnPositions, unequal.reference)
    assert difference(expected, train(OwnPositions, unequal)) <= 1e-10


def test_the_barrier_between_compiled_micro_batches_is_no_difference():
    differences = []

    def step(x, number):
        first = MicroBatchTrace([x], tf.zeros([]), 4, [x + number])  # a dropout mask reads the step
        with order.run_after([first.losses], (x, number), compiled=True) as (y, later):
            second = MicroBatchTrace([y], tf.zeros([]), 4, [y + later])
        trace = Trace([x], [UpdateTrace([x], micro_batches=[first, second])])
        differences.append(compare_micro_batches(trace))

    tf.function(step).get_concrete_function(tf.ones([4]), tf.ones([]))
    assert differences == [None]
