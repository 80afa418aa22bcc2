"""Steps with several updates, by `StandardTrainer.minimize`."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.rows import row_mask
from ctl.update import conditions
from tests.support import one_batch
from tests.support.checks import one_line

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


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(
    ("choose", "number"),
    [
        (lambda x: tf.boolean_mask(x, x[:, 0] > 5), "an unknown number of"),
        (lambda x: x[:1], "1"),
        (lambda x: tf.concat([x, x], axis=0), r"\d+"),
    ],
)
def test_other_rows_than_those_of_the_batch_are_rejected(choose, number, replicas):
    class Chosen(one_batch.Trainer):
        EXAMPLES = EXAMPLES
        build_model = TwoModels.build_model

        def replica_step(self, batch):
            rows = {name: choose(value) for name, value in batch.items()}
            return self.minimize(rows, lambda b: self.model(b["x"])[:, 0])

    message = (
        rf"minimize_test.py:\d+ passes minimize {number} rows, but the batch has \d: pass all of"
    )
    with one_line(message):
        one_batch.make(Chosen, 7, replicas).train(tf.constant(1))


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


RANDOM = {"x": np.random.default_rng(0).normal(size=(24, 3))}


class Delayed(one_batch.Trainer):
    """The second of two updates is applied in every third step."""

    EXAMPLES = RANDOM
    applied = None  # whether to make the update at all; None for `when`

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.other = tf_keras.Sequential([dense(input_shape=[3])])
            self.other_optimizer = tf_keras.optimizers.SGD(0.1)

    def build_model(self):
        layers = [dense(input_shape=[3]), ctl.SyncBatchNormalization(), dense()]
        return tf_keras.Sequential(layers)

    def condition(self, batch, loss):
        return self.global_step % 3 == 0

    def losses(self, batch):
        return (self.model(batch["x"], training=True)[:, 0] - batch["x"][:, 0]) ** 2

    def replica_step(self, batch):
        loss = self.minimize(
            batch,
            lambda b: (self.other(b["x"])[:, 0] - b["x"][:, 1]) ** 2,
            variables=self.other.trainable_variables,
            optimizer=self.other_optimizer,
        )
        if self.applied is None:
            return loss + self.minimize(batch, self.losses, when=self.condition(batch, loss))
        return loss + self.minimize(batch, self.losses) if self.applied else loss


def make_delayed(cls, batch, replicas, **options):
    return one_batch.make(cls, batch, replicas, ema_decay=0.9, **options)


def state_of(trainer):
    models = trainer.model, trainer.other
    values = [w for model in models for w in model.get_weights()]
    values += [trainer.optimizer.iterations.numpy(), trainer.other_optimizer.iterations.numpy()]
    with trainer.averaged_weights():
        values += [w for model in models for w in model.get_weights()]
    return np.concatenate([np.ravel(each) for each in values])


@pytest.mark.parametrize(
    ("batch", "replicas", "options"), [(8, 2, {"on_non_finite": "skip"}), (5, 4, {})]
)
def test_an_update_under_a_condition_is_that_of_a_step_without_it(batch, replicas, options):
    """Weights, moving statistics, counts of the optimizers and averages."""
    expected = make_delayed(Delayed, batch, 1)
    for step in range(5):
        expected.applied = step % 3 == 0
        expected.train(tf.constant(1))
    trainer = make_delayed(Delayed, batch, replicas, **options)
    results = trainer.train(tf.constant(5))
    assert trainer.optimizer.iterations == 2 and trainer.other_optimizer.iterations == 5
    np.testing.assert_allclose(state_of(trainer), state_of(expected), rtol=0, atol=1e-12)
    assert not results.get("skipped_steps", 0)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (lambda self, batch, loss: loss < 1e9, None),  # a value of the global batch
        (lambda self, batch, loss: tf.reduce_mean(batch["x"]) < 9, "depends on the rows of a repl"),
        (lambda self, batch, loss: True, "when is a bool, but must be a scalar tensor"),
        (lambda self, batch, loss: self.global_step, "scalar tensor of bools, such as"),
    ],
)
def test_a_condition_is_a_value_of_the_global_batch(condition, message):
    trainer = make_delayed(type("", (Delayed,), {"condition": condition}), 5, 2)
    if message is None:
        trainer.train(tf.constant(2))
        assert trainer.optimizer.iterations == 2
        return
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(tf.constant(1))


def test_a_device_that_cannot_leave_an_update_out_is_an_error(pretend_strategy):
    pretend_strategy("tpu")
    rows = row_mask.Rows()
    with pytest.raises(ctl.UsageError, match="which TPUs and the workers of parameter servers can"):
        conditions.check(tf.constant(True), rows)


START = 3


def test_a_number_of_python_that_changes_is_traced_again_and_named_once(caplog, monkeypatch):
    class Started(Delayed):
        def losses(self, batch):
            return super().losses(batch) * (1.0 if START < 3 else 0.0)

    trainer = make_delayed(Started, 8, 1)
    before = trainer.model.get_weights()[0]
    trainer.train(tf.constant(1))
    np.testing.assert_array_equal(trainer.model.get_weights()[0], before)
    for start in (2, 1):
        monkeypatch.setitem(globals(), "START", start)
        trainer.train(tf.constant(3))
    assert np.abs(trainer.model.get_weights()[0] - before).max() > 1e-3
    assert caplog.text.count("START in ") == 1
    assert "has changed since the step was traced" in caplog.text


@pytest.mark.parametrize("own", [True, False])
def test_train_step_that_leaves_padding_out_is_rejected(own):
    """As it is written for Orbit: the batch without its mask would count rows that do not exist."""

    class OwnTrainStep(TwoModels):
        def train_step(self, iterator):
            batch, _ = next(iterator)
            self.strategy.run(self.replica_step, args=(batch,))

    if not own:
        OwnTrainStep.replica_step = one_batch.Trainer.replica_step
    with pytest.raises(ctl.UsageError, match=r"padding .*super\(\)\.train_step\(iterator\)"):
        one_batch.make(OwnTrainStep, 7, 2).train(tf.constant(1))
