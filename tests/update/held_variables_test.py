"""Trainable variables outside of the model are trained with it, or named in one line."""

import functools
import logging

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import ps_values
import tf_keras

import ctl
from ctl import testing
from ctl.errors import UsageError
from ctl.update.held_variables import Untrained
from tests.support import one_batch

START = 0.5
X = np.random.RandomState(0).randn(12, 3)
Y = np.random.RandomState(1).randn(12, 1)
EXAMPLES = {"x": X, "label": Y}


class Learned(one_batch.Trainer):
    """Learns the variance of its targets (Kendall et al. 2018) in an attribute."""

    EXAMPLES = EXAMPLES
    late = False

    def __init__(self, **arguments):
        super().__init__(**arguments)
        if self.late:
            with self.build_scope():
                self.log_variance = tf.Variable(START, dtype=tf.float64)

    def build_model(self):
        if not self.late:
            self.log_variance = tf.Variable(START, dtype=tf.float64)
        return tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="ones")])

    def per_example_loss(self, batch, outputs):
        errors = tf.reduce_sum((batch["label"] - outputs) ** 2, axis=1)
        return tf.exp(-self.log_variance) * errors + self.log_variance


class Late(Learned):
    late = True


class Penalized(Late):
    """Reads the variable in the penalty alone."""

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs, axis=1)

    def regularization_losses(self):
        return [0.25 * tf.square(self.log_variance)]


def test_variable_that_a_penalty_reads_is_trained(caplog):
    trainer = one_batch.make(Penalized, 8, 2)
    before = float(trainer.log_variance.numpy())
    trainer.train(tf.constant(1))
    np.testing.assert_allclose(trainer.log_variance.numpy(), before - 0.5 * before)
    (line,) = caplog.messages
    assert line.startswith("The optimizer also trains what the losses read outside of the model, ")


class OwnStep(Late):
    """Reads the variable in the loss of its own step."""

    def replica_step(self, batch):
        return self.minimize(batch, lambda rows: self.losses(rows, self.model(rows["x"])))

    losses = Learned.per_example_loss

    def per_example_loss(self, batch, outputs):
        return ctl.StandardTrainer.per_example_loss(self, batch, outputs)


def reference(steps, rate, size, clip=np.inf):
    """By hand: SGD of the global batch, for kernel, bias and log_variance."""
    w, b, s, begin = np.ones([3, 1]), 0.0, START, 0
    for _ in range(steps):
        rows = np.arange(begin, begin + size) % len(X)
        errors, begin = Y[rows] - X[rows] @ w - b, begin + size
        d_error = -2 * np.exp(-s) * errors / size
        gradient = [X[rows].T @ d_error, d_error.sum(), 1 - np.exp(-s) * (errors**2).mean()]
        scale = min(1.0, clip / np.sqrt(sum((g**2).sum() for g in map(np.asarray, gradient))))
        w, b, s = (v - rate * scale * g for v, g in zip((w, b, s), gradient, strict=True))
    return s, w


@pytest.mark.parametrize(
    ("cls", "replicas", "options"),
    [
        (Learned, 4, {}),
        (Late, 1, {}),
        (Late, 2, {"micro_batches": 2}),
        (OwnStep, 1, {}),
        (OwnStep, 4, {}),
    ],
)
def test_variable_of_the_trainer_that_the_loss_reads_is_trained_with_the_model(
    cls, replicas, options
):
    trainer = one_batch.make(cls, 5, replicas, clip=ctl.Clip(global_norm=0.7), **options)
    trainer.train(tf.constant(3))
    expected = reference(3, 1.0, 5, clip=0.7)
    variables = (trainer.log_variance, trainer.model.trainable_variables[0])
    for value, variable in zip(expected, variables, strict=True):
        copies = testing.copies(trainer.strategy, variable)
        assert len(copies) == replicas
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-12)
    assert abs(expected[0] - START) > 0.01


@pytest.mark.parametrize("cls", [Learned, Late])
def test_groups_averages_slots_and_checkpoints_have_it(cls, tmp_path):
    def make(**options):
        groups = [{"variables": "log_variance/*", "learning_rate_scale": 0.5}]
        trainer = cls(
            strategy=one_batch.strategy(1),
            global_batch_size=4,
            optimizer=lambda: tf_keras.optimizers.Adam(0.1),
            options=ctl.TrainerOptions(
                precision="float64", ema_decay=0.5, optimizer_groups=groups, **options
            ),
        )
        return trainer, tf.train.Checkpoint(**trainer.checkpoint_items())

    trainer, checkpoint = make()
    trainer.train(tf.constant(1))
    # The first step of Adam is the learning rate, here with the factor of the group.
    np.testing.assert_allclose(abs(trainer.log_variance.numpy() - START), 0.05, atol=1e-6)
    after = trainer.log_variance.numpy()
    with trainer.averaged_weights():  # (1 + 1) / (10 + 1) is below the decay
        np.testing.assert_allclose(trainer.log_variance, after + (START - after) * 2 / 11)
    path = checkpoint.write(str(tmp_path / "ckpt"))
    trainer.train(tf.constant(2))
    other, restored = make()
    restored.read(path).assert_consumed()
    other.train(tf.constant(2))
    assert other.log_variance.numpy() == trainer.log_variance.numpy()


def test_group_freezes_it():
    groups = [{"variables": "log_variance/*", "frozen": True}]
    trainer = one_batch.make(Late, 4, 1, optimizer_groups=groups)
    trainer.train(tf.constant(2))
    assert trainer.log_variance.numpy() == START


class Layers(Learned):
    """Reads a layer and a module, and has variables that are no weights."""

    def build_model(self):
        self.heads = [tf_keras.layers.Dense(1, use_bias=False)]
        self.module = tf.Module()
        self.module.scale = tf.Variable(START, dtype=tf.float64)
        self.center = tf.Variable(0.0, dtype=tf.float64)  # assigned by the loss
        self.unused = tf.Variable(0.0, dtype=tf.float64)
        return super().build_model()

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs) + (self.module.scale - self.center) ** 2
        self.center.assign(1.0)
        return losses + tf.reduce_sum((self.heads[0](batch["x"]) - batch["label"]) ** 2, axis=1)


def test_layers_and_modules_are_trained_and_assigned_variables_are_not(caplog):
    trainer = one_batch.make(Layers, 4, 2)
    head = trainer.heads[0].kernel.numpy()
    trainer.train(tf.constant(1))
    assert trainer.module.scale.numpy() == START - 2 * START
    assert abs(trainer.heads[0].kernel.numpy() - head).min() > 1e-3
    assert (trainer.center.numpy(), trainer.unused.numpy()) == (1.0, 0.0)
    (line,) = caplog.messages
    assert line.startswith("The optimizer also trains what the losses read outside of the model, ")
    assert "Variable:0" in line


def make_step(loss, strategy=None):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, dtype="float64")])
    model.build((None, 3))
    return ctl.Step(
        model, tf_keras.optimizers.SGD(0.1), loss, global_batch_size=12, precision="float64"
    )


BATCH = {"x": tf.constant(X), "label": tf.constant(Y)}


def test_variable_of_a_closure_is_named_unless_the_step_holds_it(caplog):
    scale = tf.Variable(START, dtype=tf.float64, name="scale")

    def loss(batch, outputs):
        return scale * tf.reduce_sum((batch["label"] - outputs) ** 2, axis=1)

    make_step(loss)(BATCH)
    assert scale.numpy() == START
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "scale:0, which the step does not train" in caplog.text
    caplog.clear()
    step = make_step(loss)
    step.scale = scale
    step(BATCH)
    assert scale.numpy() < START
    (line,) = caplog.messages
    assert "also trains" in line and "scale:0: set trainable=False" in line


@pytest.mark.parametrize(
    ("kind", "warns"), [("frozen", False), ("stopped", False), ("trainable", True)]
)
def test_teacher_in_a_closure_is_named_only_if_it_could_be_trained(kind, warns, caplog):
    teacher = tf_keras.Sequential([tf_keras.layers.Dense(1, dtype="float64", name="teacher")])
    teacher.build((None, 3))
    teacher.trainable = kind != "frozen"

    def loss(batch, outputs):
        target = teacher(batch["x"])
        target = tf.stop_gradient(target) if kind == "stopped" else target
        return tf.reduce_sum((target - outputs) ** 2, axis=1)

    make_step(loss)(BATCH)
    assert ("teacher/kernel:0" in caplog.text) == warns
    assert ("make it an attribute" in caplog.text) == warns
    caplog.clear()
    step = make_step(loss)
    step.teacher = teacher  # the step holds it already
    step(BATCH)
    assert ("train a further model by minimize" in caplog.text) == warns
    assert "make it an attribute" not in caplog.text
    caplog.clear()
    step = make_step(loss)
    step.models.append(teacher)  # another step may train it, as those of a GAN
    step(BATCH)
    assert not caplog.messages


class Judged(Learned):
    """Updates a model, and the judge that its loss reads, which the first call builds if it is late."""

    def __init__(self, *, order, late, **arguments):
        super().__init__(**arguments)
        self.order = order
        with self.build_scope():
            self.judge = tf_keras.Sequential([tf_keras.layers.Dense(1, name="judge")])
            self.rate = tf_keras.optimizers.SGD(0.1)
            if not late:
                self.judge.build((None, 1))
                self.rate.build(self.judge.trainable_variables)

    def losses(self, batch):
        return self.judge(self.model(batch["x"]))[:, 0]

    def replica_step(self, batch):
        for each in self.order:
            if each == "judge":
                variables = self.judge.trainable_variables
                loss = self.minimize(batch, self.losses, variables=variables, optimizer=self.rate)
            else:
                loss = self.minimize(batch, self.losses)
        return loss


@pytest.mark.parametrize(
    ("order", "late", "warns"),
    [
        (("model", "judge"), False, False),
        (("judge", "model"), False, False),
        (("model", "judge"), True, False),
        (("model",), False, True),
        (("model",), True, True),
    ],
)
def test_model_that_another_update_of_the_step_trains_is_not_named(order, late, warns, caplog):
    one_batch.make(functools.partial(Judged, order=order, late=late), 8, 2).train(tf.constant(1))
    assert ("judge/kernel:0" in caplog.text) == warns


class Mixed(Learned):
    """Reads a layer that nobody holds, in bfloat16."""

    def build_model(self):
        layer = tf_keras.layers.Dense(1)
        layer.build((None, 3))
        self.read = lambda x: layer(x)[:, 0]
        return tf_keras.Sequential([tf_keras.layers.Dense(1)])

    def per_example_loss(self, batch, outputs):
        return tf.cast(self.read(batch["x"]), tf.float32) + outputs[:, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_mixed_precision_names_only_what_the_step_does_not_train(replicas, caplog):
    one_batch.make(Mixed, 8, replicas, precision="bfloat16").train(tf.constant(1))
    (line,) = caplog.messages
    assert line.startswith("The loss depends on kernel:0, bias:0, which the step ")


@pytest.mark.parametrize("replicas", [1, 2])
def test_variable_of_a_parameter_server_is_trained_as_its_wrapper(replicas):
    held, other = tf.Variable(1.0), tf.Variable(2.0)
    wrapped = ps_values.CachingVariable(held)
    if replicas > 1:
        strategy, aggregation = tf.distribute.get_strategy(), tf.VariableAggregation.NONE
        wrapped = ps_values.AggregatingVariable(strategy, wrapped, aggregation)

    @tf.function
    def find():
        with tf.GradientTape() as tape:
            tf.convert_to_tensor(wrapped), tf.convert_to_tensor(other)
        found.extend(Untrained(tuple).find(tape, [wrapped]))

    found = []
    find()
    assert found == [other]


def test_variable_that_is_set_after_the_first_update_or_outside_of_the_scope_is_rejected():
    trainer = one_batch.make(Learned, 4, 1)
    trainer.train(tf.constant(1))
    with trainer.build_scope():
        trainer.log_variance = tf.Variable(START, dtype=tf.float64)
    with pytest.raises(UsageError, match="became an attribute after the first update"):
        trainer.train(tf.constant(1))
    trainer = one_batch.make(Late, 4, 2)
    trainer.log_variance = tf.Variable(START, dtype=tf.float64)
    with pytest.raises(UsageError, match="created outside the strategy's scope"):
        trainer.train(tf.constant(1))


class Weighted(Late):
    """Reads the variable in the weights alone."""

    stops = False

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum((batch["label"] - outputs) ** 2, axis=1)

    def sample_weight(self, batch):
        weights = tf.exp(batch["x"][:, 0] * self.log_variance)
        return tf.stop_gradient(weights) if self.stops else weights


class Stopped(Weighted):
    stops = True


class Prepared(Learned):
    """Reads the variable in `preprocess`."""

    per_example_loss = Weighted.per_example_loss

    def preprocess(self, batch):
        return {**batch, "x": batch["x"] * self.log_variance}


class WeightedTwice(Weighted):
    """Reads the variable in the loss, too, which trains it by a part of its gradient."""

    per_example_loss = Learned.per_example_loss


class PreparedTwice(Prepared):
    per_example_loss = Learned.per_example_loss


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("cls", "hook", "others"),
    [
        (Weighted, "sample_weight", 0), (Stopped, "", 0), (Prepared, "preprocess", 0),
        (WeightedTwice, "sample_weight", 1), (PreparedTwice, "preprocess", 1),
    ],
)  # fmt: skip
def test_variable_whose_hook_gets_no_gradient_is_named(cls, hook, others, replicas, caplog):
    """The other line says that the step trains it, by what the loss reads."""
    trainer = one_batch.make(cls, 8, replicas)
    trainer.train(tf.constant(1))
    line = f"{hook} depends on Variable:0, but what it returns gets no gradient"
    assert [line in each for each in caplog.messages].count(True) == bool(hook)
    assert len(caplog.messages) == bool(hook) + others
    assert (trainer.log_variance.numpy() == START) == (not others)
