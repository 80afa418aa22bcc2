"""Steps with several updates, by `StandardTrainer.minimize`."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.support import one_batch

EXAMPLES = {"x": np.arange(1.0, 25.0).reshape(8, 3)}


def dense(**arguments):
    return tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", **arguments)


class TwoModels(one_batch.Trainer):
    """Models that share no variable, each with a penalty."""

    EXAMPLES = EXAMPLES
    optimizer_of_other = True

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.other = tf_keras.Sequential([dense(kernel_regularizer="l1", input_shape=[3])])
            both = tf_keras.Sequential([self.model, dense()])  # contains the layers of the first
            self.models = [both, tf_keras.optimizers.SGD(0.5)]
            both.build([None, 3])

    def build_model(self):
        return tf_keras.Sequential([dense(kernel_regularizer="l2", input_shape=[3])])

    def replica_step(self, batch):
        optimizer = self.models[1] if self.optimizer_of_other else None
        variables = self.other.trainable_variables
        one = self.minimize(
            batch, lambda b: 0 * self.other(b["x"])[:, 0], variables=variables, optimizer=optimizer
        )
        two = self.minimize(batch, lambda b: 0 * self.model(b["x"])[:, 0])
        variables = self.model.trainable_variables
        three = self.minimize(batch, lambda b: 0 * self.model(b["x"])[:, 0], variables=variables)
        return one + 100 * two + 10_000 * three


def test_update_has_the_penalties_of_the_variables_that_it_trains():
    trainer = one_batch.make(TwoModels, 8, 2, micro_batches=2)
    loss = float(trainer.train(tf.constant(1))["loss"])
    # l1 and l2 of three ones are 0.03; the second update moves each 1 by -0.02 before the third.
    np.testing.assert_allclose(loss, 0.03 + 100 * 0.03 + 10_000 * 0.03 * 0.98**2, rtol=1e-6)
    # The gradient of 0.01 |w| is 0.01, at rate 0.5; that of 0.01 w^2 is 0.02 w, twice at rate 1.
    np.testing.assert_allclose(trainer.other.get_weights()[0], 0.995, rtol=1e-6)
    np.testing.assert_allclose(trainer.model.get_weights()[0], 0.98**2, rtol=1e-6)


def test_own_regularization_losses_are_used_for_all_updates():
    class Own(TwoModels):
        def regularization_losses(self):
            return [tf.constant(1.0)]

    loss = float(one_batch.make(Own, 8, 1).train(tf.constant(1))["loss"])
    assert loss == 1 + 100 + 10_000


@pytest.mark.parametrize("outside", ["model", "other", "slots"])
def test_what_was_built_outside_of_the_scope_is_rejected_in_one_line(outside):
    other = tf_keras.Sequential([dense(input_shape=[3])])

    class Outside(TwoModels):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            if outside == "other":
                self.other = other
            else:
                optimizer = tf_keras.optimizers.SGD(0.5, momentum=0.9)
                optimizer.build(self.other.trainable_variables)
                self.models = [self.models[0], optimizer]

        def build_model(self):
            return other if outside == "model" else super().build_model()

    line = r"^\S*kernel:0, which the step updates, was created outside the strategy's scope: build"
    with pytest.raises(ctl.UsageError, match=line):
        one_batch.make(Outside, 8, 2).train(tf.constant(1))


def test_variables_that_the_optimizer_was_not_built_for_are_rejected():
    trainer = one_batch.make(type("", (TwoModels,), {"optimizer_of_other": False}), 8, 1)
    message = (
        r"minimize got dense\w*/kernel:0, for which its optimizer has no slot variables: make a"
    )
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(tf.constant(1))


@pytest.mark.parametrize(
    ("layer", "batch", "options", "message"),
    [
        (lambda: dense(activity_regularizer="l2"), 5, {}, "ActivityRegularizer/.* the rows of the"),
        (
            ctl.SyncBatchNormalization,
            8,
            {"micro_batches": 2},
            "but a micro-batch is computed without",
        ),
        (ctl.SyncBatchNormalization, 8, {"logical_shards": 2}, "computes one shard at a time"),
    ],
)
def test_layer_of_a_further_model_that_depends_on_the_split_is_rejected(
    layer, batch, options, message
):
    class Further(TwoModels):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            with self.build_scope():
                self.further = tf_keras.Sequential([layer(), dense()])
                self.further.build([None, 3])

        def replica_step(self, batch):
            return self.minimize(
                batch,
                lambda b: self.further(b["x"], training=True)[:, 0],
                variables=self.further.trainable_variables,
                optimizer=self.models[1],
            )

    with pytest.raises(ctl.UsageError, match=message):
        one_batch.make(Further, batch, 2, **options).train(tf.constant(1))
