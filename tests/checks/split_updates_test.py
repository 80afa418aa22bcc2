"""Parts of the update and optimizers that use the split of the batch are rejected."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.users_code import running
from tests.users_code.examples import Case


def divide(gradients, variables):
    number = tf.distribute.get_strategy().num_replicas_in_sync
    return [gradient / number for gradient in gradients]


class Transformed(Case):
    def transform_gradients(self, gradients, variables):
        return divide(gradients, variables)


class Summing(ctl.Part):
    def before(self, update):
        context = tf.distribute.get_replica_context()
        update.gradients = [context.all_reduce("SUM", each) for each in update.gradients]


class WithPart(Case):
    def build_parts(self):
        return [Summing()]


class Dividing(tf_keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        number = tf.distribute.get_strategy().num_replicas_in_sync
        super().update_step(gradient / number, variable)


def build(case, optimizer, replicas=2, **options):
    return case(
        global_batch_size=8,
        strategy=running.strategy(replicas),
        optimizer=lambda: optimizer(0.1),
        options=ctl.TrainerOptions(precision="float64", **options),
    )


@pytest.mark.parametrize(
    ("case", "optimizer", "name"),
    [
        (Transformed, tf_keras.optimizers.SGD, "num_replicas_in_sync"),
        (WithPart, tf_keras.optimizers.SGD, "all_reduce"),
        (Case, Dividing, "num_replicas_in_sync"),
    ],
)
def test_the_line_that_uses_the_split_is_named(case, optimizer, name):
    message = rf"split_updates_test\.py:\d+ uses {name} in an optimizer or a part"
    with pytest.raises(ctl.UsageError, match=message) as raised:
        build(case, optimizer).train(tf.constant(1))
    assert "\n" not in str(raised.value)


def test_it_can_be_accepted():
    build(Transformed, Dividing, allow_row_coupling=True).train(tf.constant(1))


def test_optimizers_of_ctl_may_communicate():
    """The parts of the options, and a loss that computes with the split, are no code of an update."""
    build(Case, tf_keras.optimizers.Adam, ema_decay=0.9, shard_state="gradients").train(
        tf.constant(1)
    )


class ByHand(Case):
    """Averages the losses of a replica, so that an update depends on the split."""

    def replica_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.per_example_loss(batch, self.forward(batch, True)))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def test_an_update_without_minimize_is_named_once(caplog):
    trainer = build(ByHand, tf_keras.optimizers.SGD, 1)
    for steps in (1, 2):
        trainer.train(tf.constant(steps))
    (line,) = caplog.messages
    assert line.startswith("replica_step updates the model itself")
