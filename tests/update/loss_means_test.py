"""Several losses with their own shapes, weights and denominators are those of the global batch."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

ROWS, STEPS, FACTORS = 5, 10, {"kind": 1.0, "series": 0.3}
RANDOM = np.random.default_rng(0)
EXAMPLES = {
    "x": RANDOM.normal(size=(ROWS, 3)),
    "kind": RANDOM.integers(0, 4, ROWS),
    "series": RANDOM.normal(size=(ROWS, 6)),
    "present": RANDOM.integers(0, 2, (ROWS, 6)),
    "count": RANDOM.uniform(0.2, 3.0, ROWS),
}


def build_model():
    x = tf_keras.Input([3])
    hidden = tf_keras.layers.Dense(5, activation="tanh")(x)
    heads = {"kind": tf_keras.layers.Dense(4), "series": tf_keras.layers.Dense(6)}
    return tf_keras.Model(x, {name: head(hidden) for name, head in heads.items()})


def losses(batch, outputs):
    kind = tf_keras.losses.sparse_categorical_crossentropy(
        batch["kind"], outputs["kind"], from_logits=True
    )
    return {"kind": kind, "series": (batch["series"] - outputs["series"]) ** 2}


def weights(batch, training=True):
    return {"kind": batch["count"], "series": batch["present"]}


class Two(ctl.StandardTrainer):
    def build_model(self):
        return build_model()

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(EXAMPLES)

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        return losses(batch, outputs)

    def sample_weight(self, batch, training=True):
        return weights(batch)


def make_trainer(replicas, *, cls=Two, loss_weights=FACTORS, **options):
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=ROWS,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2),
        options=ctl.TrainerOptions(precision="float64", loss_weights=loss_weights, **options),
    )


def numbers(results):
    return {name: float(results[name]) for name in ("loss", "kind_loss", "series_loss")}


@functools.cache
def expected():
    """The weights and the losses of a loop of plain TensorFlow, written by the definition."""
    initial = make_trainer(1).model.get_weights()
    tf_keras.backend.set_floatx("float64")
    try:
        model, optimizer = build_model(), tf_keras.optimizers.Adam(1e-2)
        model.set_weights(initial)
        batch = {name: tf.constant(value) for name, value in EXAMPLES.items()}
        history = []
        for step in range(STEPS + 1):
            with tf.GradientTape() as tape:
                each, share = losses(batch, model(batch["x"])), weights(batch)
                means = {}
                for name, loss in each.items():
                    weight = tf.cast(share[name], tf.float64)
                    means[f"{name}_loss"] = tf.reduce_sum(loss * weight) / tf.reduce_sum(weight)
                total = means["kind_loss"] + 0.3 * means["series_loss"]
            history.append(numbers({"loss": total, **means}))
            if step < STEPS:
                gradients = tape.gradient(total, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return [w.numpy() for w in model.weights], history
    finally:
        tf_keras.backend.set_floatx("float32")


def check(model, strategy, trained, evaluated):
    final, history = expected()
    for variable, value in zip(model.weights, final, strict=True):
        for copy in testing.copies(strategy, variable):
            np.testing.assert_allclose(copy, value, atol=1e-10)
    means = {name: np.mean([each[name] for each in history[:-1]]) for name in history[0]}
    assert numbers(trained) == pytest.approx(means, abs=1e-10)
    assert numbers(evaluated) == pytest.approx(history[-1], abs=1e-10)


class SkippedStep(Two):
    """The loss of the third step is not a number."""

    def per_example_loss(self, batch, outputs):
        values = losses(batch, outputs)
        bad = tf.where(self.global_step.read_value() == 2, float("nan"), 1.0)
        return {**values, "kind": values["kind"] * tf.cast(bad, tf.float64)}


@pytest.mark.parametrize(
    ("cls", "replicas", "options"),
    [
        (SkippedStep, 2, {"micro_batches": 2, "on_non_finite": "skip"}),  # 3 + 2 rows
        pytest.param(Two, 2, {"xla": "gradients"}, marks=pytest.mark.slow),
        # 2 + 2 + 1 + 0 rows
        pytest.param(SkippedStep, 4, {"on_non_finite": "skip"}, marks=pytest.mark.slow),
    ],
)
def test_update_and_reported_losses_are_those_of_the_global_batch(cls, replicas, options):
    trainer = make_trainer(replicas, cls=cls, **options)
    skipped = int(cls is SkippedStep)
    trained = trainer.train(tf.constant(STEPS + skipped))
    assert int(trained.get("skipped_steps", 0)) == skipped
    evaluated = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    check(trainer.model, trainer.strategy, trained, evaluated)


@pytest.mark.slow
def test_a_step_of_ones_own_loop_has_the_same_losses():
    step = ctl.Step(
        build_model, lambda: tf_keras.optimizers.Adam(1e-2), losses, global_batch_size=ROWS,
        forward=lambda batch, training: step.model(batch["x"], training=training),
        sample_weight=weights, strategy=testing.make_strategy(2), precision="float64",
        loss_weights=FACTORS,
    )  # fmt: skip
    source = ctl.data.arrays(EXAMPLES)
    batches = iter(ctl.data.distribute(source, ROWS, step.strategy))
    step.build(next(iter(ctl.data.distribute(source, ROWS, step.strategy))))
    for variable, value in zip(
        step.model.weights, make_trainer(1).model.get_weights(), strict=True
    ):
        variable.assign(value)
    for _ in range(STEPS):
        step(next(batches))
    check(step.model, step.strategy, step.results(), ctl.evaluate(step, source))


@pytest.mark.parametrize(
    ("loss_weights", "returned", "message"),
    [
        ({}, losses, r"the losses kind, series, but loss_weights names none: set .*\(kind=1.0"),
        ({"kind": 1.0}, losses, "losses kind, series, but loss_weights names kind:"),
        (FACTORS, lambda *x: losses(*x)["kind"], "one loss, but .* names kind, series: return a"),
    ],
)
def test_losses_must_have_the_names_of_the_config(loss_weights, returned, message):
    methods = {"per_example_loss": lambda self, *x: returned(*x), "sample_weight": lambda *_: None}
    cls = type("Other", (Two,), methods)
    with pytest.raises(ctl.UsageError, match=message):
        make_trainer(1, cls=cls, loss_weights=loss_weights).train(tf.constant(1))


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("kind_loss", "the loss 'kind' of loss_weights"),
        ("loss", "the loss"),
        ("examples", "the number of examples"),
    ],
)
def test_a_metric_must_not_have_the_name_of_another_result(name, reported):
    metrics = {name: tf_keras.metrics.Mean()}
    cls = type("Other", (Two,), {"build_metrics": lambda self: metrics})
    with pytest.raises(ctl.UsageError, match=f"a metric '{name}', but ctl reports {reported} by"):
        make_trainer(1, cls=cls).train(tf.constant(1))


def test_weights_must_have_the_names_of_the_losses():
    cls = type("Other", (Two,), {"sample_weight": lambda self, batch: {"kind": batch["count"]}})
    with pytest.raises(ctl.UsageError, match="loss_weights names kind, series"):
        make_trainer(1, cls=cls).train(tf.constant(1))


def test_factors_that_nothing_reads_are_rejected():
    cls = type("Own", (Two,), {"replica_step": lambda self, batch: tf.reduce_sum(batch["x"])})
    with pytest.raises(ctl.UsageError, match="loss_weights has no effect"):
        make_trainer(1, cls=cls).train(tf.constant(1))
    with pytest.raises(ctl.UsageError, match=r"loss_weights.kind is 'much'"):
        ctl.TrainerOptions(loss_weights={"kind": "much"})
