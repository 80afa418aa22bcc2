"""State of a step that is no variable, which all replicas and micro-batches share, is rejected."""

import pytest
import tensorflow as tf

import ctl
from tests.users_code import running
from tests.users_code.examples import CLASSES, Case
from tests.users_code.running import Split


class Queue(Case):
    def build_model(self):
        self.queue = tf.queue.FIFOQueue(100, [tf.float64], shapes=[[CLASSES]])
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        self.queue.enqueue_many([tf.stop_gradient(outputs)])
        losses = super().per_example_loss(batch, outputs)
        return losses + tf.reduce_sum((outputs - self.queue.dequeue()) ** 2, axis=-1)


@pytest.mark.parametrize("split", [Split(2), Split(1, 8, micro_batches=2)])
def test_state_that_is_no_variable_is_rejected(split):
    with pytest.raises(ctl.UsageError, match=r"_test\.py:\d+ .*changes a queue or a table \(Queue"):
        running.train(Queue, split)
