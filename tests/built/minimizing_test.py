"""`minimize_each`: several losses and optimizers with one forward pass."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.update import reduction
from tests.support import one_batch

RATES = {"actor": 0.25, "critic": 0.125}
BOUND = 0.5


def dense(units, inputs, **arguments):
    return tf_keras.Sequential([tf_keras.layers.Dense(units, input_shape=[inputs], **arguments)])


class ActorCritic(one_batch.Trainer):
    """The loss of the actor depends on the critic, and that of the critic on the actor."""

    EXAMPLES = {  # noqa: RUF012
        "x": np.random.default_rng(0).normal(size=(8, 3)),
        "label": np.random.default_rng(1).normal(size=8),
        "weight": np.random.default_rng(2).uniform(0.2, 3, size=8),
    }
    poison = 1.0
    when: object = None

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.critic = dense(1, 5, kernel_regularizer="l2")
            self.critic_optimizer = tf_keras.optimizers.SGD(RATES["critic"], momentum=0.5)

    def build_model(self):
        return dense(2, 3, activation="tanh", kernel_regularizer="l2")

    def build_optimizer(self, optimizer):
        return tf_keras.optimizers.SGD(RATES["actor"], momentum=0.5)

    def losses(self, batch):
        action = self.model(batch["x"])
        value = self.critic(tf.concat([batch["x"], action], axis=1))[:, 0]
        return {"actor": -value * self.poison, "critic": (value - batch["label"]) ** 2}

    def replica_step(self, batch):
        losses = self.minimize_each(
            batch,
            self.losses,
            {
                "actor": (self.model.trainable_variables, self.optimizer),
                "critic": (self.critic.trainable_variables, self.critic_optimizer),
            },
            when=self.when and self.when(self.global_step),
        )
        return losses["actor"] + 10 * losses["critic"]


def weights(trainer):
    return [w for model in (trainer.model, trainer.critic) for w in model.get_weights()]


def expected(trainer, batch, steps, applies=lambda name, step: True):
    """The weights and the last loss of a plain loop with a persistent tape."""
    values = [tf.Variable(w) for w in weights(trainer)]
    rows = {name: tf.constant(each[:batch]) for name, each in trainer.EXAMPLES.items()}
    groups = {"actor": values[:2], "critic": values[2:]}
    slots = {id(v): np.zeros(v.shape) for v in values}
    for step in range(steps):
        with tf.GradientTape(persistent=True) as tape:
            action = tf.tanh(rows["x"] @ values[0] + values[1])
            value = (tf.concat([rows["x"], action], 1) @ values[2] + values[3])[:, 0]
            mean = lambda x: tf.reduce_sum(x * rows["weight"]) / tf.reduce_sum(rows["weight"])  # noqa: E731
            losses = {"actor": mean(-value), "critic": mean((value - rows["label"]) ** 2)}
            for name, (kernel, _) in groups.items():
                losses[name] += 0.01 * tf.reduce_sum(kernel**2)
        gradients = {k: tape.gradient(losses[k], group) for k, group in groups.items()}
        for name, group in groups.items():
            if not applies(name, step):
                continue
            clipped, _ = tf.clip_by_global_norm(gradients[name], BOUND)
            for variable, gradient in zip(group, clipped, strict=True):
                slots[id(variable)] = 0.5 * slots[id(variable)] - RATES[name] * gradient
                variable.assign_add(slots[id(variable)])
    return [v.numpy() for v in values], float(losses["actor"] + 10 * losses["critic"])


def make(batch, replicas, cls=ActorCritic, **options):
    return one_batch.make(cls, batch, replicas, clip=ctl.Clip(global_norm=BOUND), **options)


def check(trainer, values, loss):
    for _ in range(2):
        result = trainer.train(tf.constant(1))
    for actual, value in zip(weights(trainer), values, strict=True):
        np.testing.assert_allclose(actual, value, rtol=0, atol=1e-12)
    if loss is not None:
        assert float(result["loss"]) == pytest.approx(loss, abs=1e-12)


class Repeated(ActorCritic):
    """The same batch in each step."""

    def build_dataset(self, split, input_context):
        rows = {name: each[: self.global_batch_size] for name, each in self.EXAMPLES.items()}
        return tf.data.Dataset.from_tensor_slices(rows)


@pytest.mark.parametrize(
    ("batch", "replicas", "options"),
    [
        (5, 1, {}),
        (8, 2, {"micro_batches": 2, "ema_decay": 0.9}),
        (5, 4, {"on_non_finite": "skip"}),
        (8, 2, {"logical_shards": 4}),
        (8, 2, {"xla": "gradients"}),
    ],
)
def test_each_loss_trains_its_variables_by_the_gradients_of_one_forward_pass(
    batch, replicas, options, monkeypatch
):
    calls = []
    reduce = reduction.all_reduce
    monkeypatch.setattr(
        reduction, "all_reduce", lambda *a, **k: calls.append(len(a[0])) or reduce(*a, **k)
    )
    trainer = make(batch, replicas, Repeated, **options)
    check(trainer, *expected(trainer, batch, 2))
    assert {*calls} == (set() if options.get("logical_shards") else {4})  # all in one
    assert trainer.optimizer.iterations == trainer.critic_optimizer.iterations == 2


def test_a_loss_that_is_not_finite_skips_its_own_update():
    cls = type("", (Repeated,), {"poison": np.nan})
    trainer = make(5, 2, cls, on_non_finite="skip")
    check(trainer, expected(trainer, 5, 2, lambda name, step: name == "critic")[0], None)
    assert trainer.skipped_steps == 2


def test_each_update_may_have_a_condition():
    cls = type("", (Repeated,), {"when": lambda self, step: {"actor": step % 2 == 1}})
    trainer = make(5, 2, cls)
    check(trainer, *expected(trainer, 5, 2, lambda name, step: name == "critic" or step == 1))
    assert trainer.optimizer.iterations == 1 and trainer.skipped_steps == 0


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"losses": lambda self, batch: {"actor": batch["x"]}},
            "returned actor, but minimize_each",
        ),
        (
            {"losses": lambda self, batch: batch["label"]},
            "returned one loss, but minimize_each got",
        ),
        ({"when": lambda self, step: {"player": step > 0}}, "and conditions for player: name each"),
    ],
)
def test_names_that_do_not_fit_are_one_line(members, message):
    with pytest.raises(ctl.UsageError, match=message):
        make(8, 1, type("", (ActorCritic,), members)).train(tf.constant(1))
