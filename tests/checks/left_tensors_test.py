"""A tensor that a replica or a micro-batch leaves in an attribute is not that of another one."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import running
from tests.users_code.examples import CLASSES, Case, dense
from tests.users_code.running import Split, difference, train


class Hidden(tf_keras.layers.Layer):
    """Leaves its input in an attribute, before a synchronization point."""

    def __init__(self):
        super().__init__()
        self.normalization = ctl.SyncBatchNormalization()

    def call(self, inputs, training=False):
        self.hidden = inputs
        return self.normalization(inputs, training=training)


class LeftByLayer(Case):
    def build_model(self):
        self.layer = Hidden()
        return dense(self.layer)

    def per_example_loss(self, batch, outputs):
        penalty = tf.reduce_sum(self.layer.hidden**2, axis=1)
        return super().per_example_loss(batch, outputs) + penalty


class Returned(LeftByLayer):
    """What the message says."""

    def build_model(self):
        x = tf_keras.Input([6])
        hidden = tf_keras.layers.Dense(5, activation="tanh")(x)
        outputs = tf_keras.layers.Dense(CLASSES)(ctl.SyncBatchNormalization()(hidden))
        return tf_keras.Model(x, [outputs, hidden])

    def per_example_loss(self, batch, outputs):
        return Case.per_example_loss(self, batch, outputs[0]) + tf.reduce_sum(
            outputs[1] ** 2, axis=1
        )


class LeftByForward(Case):
    def forward(self, batch, training):
        outputs = super().forward(batch, training=training)
        self.outputs = outputs
        return outputs

    def per_example_loss(self, batch, outputs):
        rows = ctl.replica.all_gather(outputs)
        return tf.reduce_sum((self.outputs - tf.reduce_mean(rows, axis=0)) ** 2, axis=1)


class NamedAsReplica(LeftByForward):
    """A layer has the name that TensorFlow gives to the ops of the second replica."""

    def build_model(self):
        hidden = tf_keras.layers.Dense(5, activation="tanh", name="replica_1")
        return tf_keras.Sequential([hidden, tf_keras.layers.Dense(CLASSES)])

    def per_example_loss(self, batch, outputs):
        rows = ctl.replica.all_gather(outputs)
        return tf.reduce_sum((outputs - tf.reduce_mean(rows, axis=0)) ** 2, axis=1)


class LeftBesideName(NamedAsReplica):
    def per_example_loss(self, batch, outputs):
        return LeftByForward.per_example_loss(self, batch, outputs)


class LeftForMetric(LeftByForward):
    """No replica waits before the update, so the loss is right."""

    per_example_loss = Case.per_example_loss

    def build_metrics(self):
        return {"outputs": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["outputs"].update_state(self.outputs)


class LeftForNextMicroBatch(Case):
    losses = None

    def per_example_loss(self, batch, outputs):
        losses, earlier = super().per_example_loss(batch, outputs), self.losses
        self.losses = losses
        is_own = earlier is not None and getattr(earlier, "graph", None) is losses.graph
        return losses + earlier if is_own else losses


class SameLosses(LeftForNextMicroBatch):
    """Returns the tensor itself."""

    def per_example_loss(self, batch, outputs):
        first = self.losses
        losses = super().per_example_loss(batch, outputs)
        self.losses = first if getattr(first, "graph", None) is losses.graph else losses
        return self.losses


class RowsInAList(LeftByLayer):
    """Leaves the rows themselves, which no op of a replica has computed."""

    def build_model(self):
        self.seen = []
        return super().build_model()

    def forward(self, batch, training):
        self.seen.append(batch["x"])
        return super().forward(batch, training)

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum((outputs - tf.reduce_mean(self.seen[-1])) ** 2, axis=1)


class OfVariables(Case):
    """The gradient of a penalty that another replica computes is that of its copy of the weights."""

    def forward(self, batch, training):
        outputs = super().forward(batch, training=training)
        self.penalty = tf.reduce_sum(self.model.trainable_variables[0] ** 2)
        return outputs

    def per_example_loss(self, batch, outputs):
        ctl.replica.all_gather(outputs)
        return super().per_example_loss(batch, outputs) + self.penalty


class LeftForUpdate(LeftByForward):
    per_example_loss = Case.per_example_loss

    def transform_gradients(self, gradients, variables):
        return [gradient * tf.reduce_mean(self.outputs**2) for gradient in gradients]


class LeftForEndOfStep(LeftForUpdate):
    transform_gradients = Case.transform_gradients

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.total = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def replica_step(self, batch):
        loss = super().replica_step(batch)
        self.total.assign(tf.reduce_sum(self.outputs))
        return loss


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (LeftForUpdate, Split(2)),
        (LeftForUpdate, Split(1, 9, micro_batches=3)),
        (LeftForEndOfStep, Split(1, 8, micro_batches=2)),
        (LeftByLayer, Split(2)),
        (LeftByForward, Split(2)),
        (RowsInAList, Split(2)),
        (LeftBesideName, Split(2)),
        (LeftForMetric, Split(2)),
        (LeftForMetric, Split(1, 8, micro_batches=2)),
        (LeftForNextMicroBatch, Split(1, 8, micro_batches=2)),
        (OfVariables, Split(2)),
        (SameLosses, Split(1, 8, micro_batches=2)),
    ],
)
def test_tensor_of_another_replica_or_micro_batch_is_rejected_with_the_line(case, split):
    with pytest.raises(ctl.UsageError) as raised:
        train(case, split)
    message = str(raised.value)
    assert message.startswith("tests/") and "\n" not in message
    assert "return it as an output of the model" in message
    assert f"another {'replica' if split.replicas > 1 else 'micro-batch'}" in message


class LeftInTraining(LeftByForward):
    """An evaluation reads what a step has left."""

    def forward(self, batch, training):
        return super().forward(batch, training) if training else self.model(batch["x"])


def test_tensor_that_a_step_has_left_is_rejected_in_an_evaluation_with_one_line():
    trainer = running.build(LeftInTraining, Split(1))
    trainer.train(tf.constant(1))
    with pytest.raises(ctl.UsageError, match=r"^A tensor that tests/.*_test\.py:\d+ .*outputs\.$"):
        ctl.StandardEvaluator(trainer, global_batch_size=7).evaluate(tf.constant(-1))


class Constant(LeftByForward):
    """A tensor that is computed once, from no rows and no weights."""

    scale = None

    def per_example_loss(self, batch, outputs):
        ctl.replica.all_gather(outputs)
        if getattr(self.scale, "graph", None) is not outputs.graph:
            self.scale = tf.exp(tf.linspace(0.0, 1.0, outputs.shape[-1]))
        return tf.reduce_sum(outputs**2 * tf.cast(self.scale, outputs.dtype), axis=1)


@pytest.mark.parametrize("case", [Returned, Constant, NamedAsReplica])
def test_outputs_and_constants_are_right_on_every_split(case):
    expected = running.train(case, Split(1))
    assert difference(expected, train(case, Split(2))) <= 1e-10


@pytest.mark.slow
def test_evaluation_that_reads_a_tensor_of_another_replica_is_rejected():
    class Gathers(LeftForMetric):
        def update_metrics(self, metrics, batch, outputs, weights):
            rows = ctl.replica.all_gather(outputs)
            metrics["outputs"].update_state(tf.reduce_sum(self.outputs) + tf.reduce_sum(rows))

    trainer = running.build(Gathers, Split(2))
    with pytest.raises(ctl.UsageError, match="another replica"):
        ctl.StandardEvaluator(trainer, global_batch_size=4).evaluate(tf.constant(-1))
