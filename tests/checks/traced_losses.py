"""Traces losses of a batch as the step of one replica, whose search then rejects them or not."""

import types

import numpy as np
import tensorflow as tf

from ctl.checks.row_coupling import RowCoupling
from ctl.rows import row_mask
from ctl.rows.trace import Trace
from ctl.update.microbatches import Inputs

ROWS, TIME, FEATURES = 6, 5, 4
DRAW = np.random.default_rng(5)
BATCH = {
    "x": DRAW.normal(size=(ROWS, FEATURES)).astype(np.float32),
    "series": DRAW.normal(size=(ROWS, TIME, FEATURES)).astype(np.float32),
    "image": DRAW.uniform(size=(ROWS, 32, 32, 3)).astype(np.float32),
    "tokens": (
        DRAW.integers(1, 9, (ROWS, TIME)) * (np.arange(TIME) < [[2], [5], [3], [1], [4], [5]])
    ),
    "length": np.array([2, 5, 3, 1, 4, 5]),
    "label": np.array([0, 1, 2, 1, 0, 2]),
}
QUERY = tf.Variable(DRAW.normal(size=(FEATURES, FEATURES)).astype(np.float32))
LABEL = lambda b: tf.cast(b["label"], tf.float32)  # noqa: E731


class FakeStep:
    """Traces a loss of a batch as one replica's step."""

    def __init__(self, loss, *, replicas=2, rows=ROWS, read=4, allow=False, padded=False):
        self.reads, self.repeated = 0, []
        owner = types.SimpleNamespace(global_step=None, skipped_steps=None)
        self.attributes = types.SimpleNamespace(
            owner=owner, values=list, layer_metrics=dict, layers=list, optimizers=list
        )
        self.least = read  # the number of rows that can be read for a replica with fewer
        self.loss, self.rows, self.padded = loss, rows, padded
        options = types.SimpleNamespace(allow_row_coupling=allow, logical_shards=None)
        layout = types.SimpleNamespace(replicas=replicas, global_batch_size=1)
        self.plan = types.SimpleNamespace(options=options, layout=layout, own_replica_step=False)

    def first_batch(self, part=0.0):
        if part:
            raise StopIteration
        self.reads += 1
        rows = max(self.rows, self.least)
        return {name: tf.constant(values[:rows]) for name, values in BATCH.items()}, None

    def compute(self, batch):
        losses, rows = self.loss(batch), row_mask.current()
        inputs = Inputs(batch, None, {"": None}, {"": None}, 0, 0, None)
        rows.trace.begin_update(inputs)
        rows.trace.enter_function(inputs)
        rows.trace.add_micro_batch(batch, rows.first_row, rows.count, [losses])
        graph = tf.compat.v1.get_default_graph()
        rows.trace.add_gradients(tf.gradients(losses, [graph.capture(QUERY.handle)]))
        return losses

    def trace(self, *, static=True):
        """Returns how often the search read a batch: once for each suspect."""

        def step(batch):
            mask = tf.ones([self.rows]) if self.padded else None
            trace = Trace((batch, mask))
            first = tf.zeros([], tf.int64)
            fields = dict(count=batch["x"].shape[0], first_row=first, step=1, trace=trace)
            with row_mask.examples(**fields) as rows:
                with trace.record_collectives():
                    losses = self.compute(batch)
                RowCoupling(self).search((), rows)
                return losses

        spec = tf.nest.map_structure(
            lambda x: tf.TensorSpec([self.rows if static else None, *x.shape[1:]], x.dtype), BATCH
        )
        tf.function(step, autograph=False).get_concrete_function(spec)
        return self.reads


def trace(loss, *, static=True, **options):
    return FakeStep(loss, **options).trace(static=static)


def by_row(values):
    return tf.reduce_sum(tf.square(values), axis=range(1, values.shape.rank))


def shifted_by_the_maximum(batch):
    x = batch["x"] @ QUERY
    x -= tf.stop_gradient(tf.reduce_max(x))
    return tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(batch["label"], FEATURES), x)


def attention(batch):
    """Masked attention, with logits that are made smaller by the largest one of the batch."""
    x, mask = batch["series"] @ QUERY, tf.cast(batch["tokens"] > 0, tf.float32)
    scores = tf.einsum("btd,bsd->bts", x, x) - 1e9 * (1 - mask[:, None])
    weights = tf.exp(scores - tf.stop_gradient(tf.reduce_max(scores)))
    weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights, axis=-1, keepdims=True))
    return tf.reduce_sum((weights @ x) ** 2 * mask[:, :, None], [1, 2])
