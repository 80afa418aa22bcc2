"""`minimize_each` and `ctl.Step`: several losses and optimizers with one forward pass."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.update import reduction
from tests.support import one_batch
from tests.support.checks import close

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


def expected(trainer, *arguments):
    """The weights and the last loss of a plain loop with a persistent tape."""
    return expected_from(weights(trainer), *arguments)


def expected_from(start, batch, steps, applies=lambda name, step: True, averages=()):
    values = [tf.Variable(w) for w in start]
    rows = {name: tf.constant(each[:batch]) for name, each in ActorCritic.EXAMPLES.items()}
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
        for average, variable in zip(averages, values, strict=False):
            average += max(0.1, 9 / (11 + step)) * (variable.numpy() - average)
    return [v.numpy() for v in values], float(losses["actor"] + 10 * losses["critic"])


def make(batch, replicas, cls=ActorCritic, **options):
    return one_batch.make(cls, batch, replicas, clip=ctl.Clip(global_norm=BOUND), **options)


def check(trainer, values, loss):
    for _ in range(2):
        result = trainer.train(tf.constant(1))
    close(weights(trainer), values, 1e-12)
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
            "returned actor, but there are updates for actor, critic: return",
        ),
        (
            {"losses": lambda self, batch: batch["label"]},
            "returned one loss, but there are updates",
        ),
        ({"when": lambda self, step: {"player": step > 0}}, "and conditions for player: name each"),
    ],
)
def test_names_that_do_not_fit_are_one_line(members, message):
    with pytest.raises(ctl.UsageError, match=message):
        make(8, 1, type("", (ActorCritic,), members)).train(tf.constant(1))


class Own:
    """A loop of one's own, whose step has the models and losses of `ActorCritic`."""

    def __init__(self, batch, replicas, folder, when=None, poison=lambda step: 1.0, **options):
        self.strategy, self.when = one_batch.strategy(replicas), when
        with self.strategy.scope():
            tf_keras.utils.set_random_seed(0)
            tf_keras.backend.set_floatx("float64")
            self.model = dense(2, 3, activation="tanh", kernel_regularizer="l2")
            self.critic = dense(1, 5, kernel_regularizer="l2")
            tf_keras.backend.set_floatx("float32")

        def forward(rows, training):
            action = self.model(rows["x"], training=training)
            return self.critic(tf.concat([rows["x"], action], axis=1), training=training)[:, 0]

        def losses(rows, value):
            actor = -value * poison(self.step.global_step)
            return {"actor": actor, "critic": (value - rows["label"]) ** 2}

        models = {"actor": self.model, "critic": self.critic}
        self.step = ctl.Step(
            self.model,
            {k: (models[k], tf_keras.optimizers.SGD(RATES[k], momentum=0.5)) for k in RATES},
            losses, forward=forward, clip=ctl.Clip(global_norm=BOUND), precision="float64",
            global_batch_size=batch, strategy=self.strategy, **options,
        )  # fmt: skip
        rows = {name: each[:batch] for name, each in ActorCritic.EXAMPLES.items()}
        self.data = itertools.repeat(
            next(iter(ctl.data.distribute(ctl.data.arrays(rows), batch, self.strategy)))
        )
        self.step.build(next(self.data))
        self.checkpoints = ctl.Checkpointer(folder, self.step)

    def train(self, count):
        for batch in itertools.islice(self.data, count):
            when = self.when and self.when(self.step.global_step)
            result = self.step(batch, when=when)
        return result


@pytest.mark.parametrize(
    ("batch", "replicas", "options"),
    [
        (8, 2, {"micro_batches": 2}),
        pytest.param(5, 2, {"outputs": True}, marks=pytest.mark.slow),
        (5, 4, {"on_non_finite": "ignore"}),
    ],
)
def test_a_step_with_several_optimizers_resumes_and_trains_as_a_plain_loop(
    batch, replicas, options, tmp_path
):
    first = Own(batch, replicas, tmp_path, ema_decay=0.9, **options)
    averages = weights(first)
    values, loss = expected_from(weights(first), batch, 50, averages=averages)
    first.train(20)
    first.checkpoints.save()
    first.train(7)  # lost by the kill
    second = Own(batch, replicas, tmp_path, ema_decay=0.9, **options)
    second.checkpoints.all_restore_latest()
    second.checkpoints.save()  # the slot variables exist before the first step
    result = second.train(30)
    close(weights(second), values, 1e-10)
    losses = result.losses["actor"] + 10 * result.losses["critic"]
    assert float(losses) == pytest.approx(loss, abs=1e-10)
    with second.step.averaged_weights():
        close(weights(second), averages, 1e-10)


def test_each_update_of_a_step_is_skipped_and_wanted_by_itself(tmp_path):
    """The loss of the actor is not finite in step 3, and the critic is trained in odd steps."""
    own = Own(
        5, 4, tmp_path, when=lambda step: {"critic": step % 2 == 1},
        poison=lambda step: tf.where(step == 3, np.float64(np.nan), np.float64(1)),
    )  # fmt: skip
    applies = lambda name, step: step != 3 if name == "actor" else step % 2 == 1  # noqa: E731
    start = weights(own)
    for count in (4, 2):
        result = own.train(count)
        assert bool(result.applied) == (count == 2)
    values, _ = expected_from(start, 5, 6, applies)
    close(weights(own), values, 1e-12)
    assert own.step.skipped_steps == 1
    results = own.step.results()
    assert np.isfinite([results["loss"], results["actor_loss"], results["critic_loss"]]).all()


def test_conditions_inside_of_a_function_and_of_strategy_run(tmp_path):
    own = Own(5, 2, tmp_path)
    start = weights(own)

    @tf.function
    def train(batch):
        own.step(batch, when={"actor": own.step.global_step > 0})
        inner = lambda rows: own.step(rows, when={"actor": own.step.global_step > 5}).loss  # noqa: E731
        own.strategy.run(inner, args=(batch,))

    tf_keras.backend.set_floatx("float64")
    try:
        train(next(own.data))
    finally:
        tf_keras.backend.set_floatx("float32")
    values, _ = expected_from(start, 5, 2, lambda name, step: name == "critic")
    close(weights(own), values, 1e-12)


def test_losses_of_a_step_with_several_optimizers_are_compared(tmp_path, caplog):
    Own(5, 2, tmp_path).train(1)
    assert "cannot check" not in caplog.text
    calls = itertools.count(1)
    with pytest.raises(ctl.UsageError, match="in one of the replicas and"):
        Own(5, 2, tmp_path, poison=lambda step: float(next(calls))).train(1)


@pytest.mark.parametrize(
    ("optimizers", "options"),
    [({}, {}), ({"actor": None}, {}), ({"actor": (None, None)}, {"loss_weights": {"actor": 2.0}})],
)
def test_optimizers_of_a_step_without_a_pair_for_each_loss_are_one_line(optimizers, options):
    with pytest.raises(ctl.UsageError, match="Several optimizers are a dict with a pair for each"):
        ctl.Step(dense(1, 3), optimizers, lambda *_: None, global_batch_size=4, **options)
