"""The number that a loss is divided by is that of the global batch, however it is split."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.support import one_batch

RANDOM = np.random.default_rng(0)
EXAMPLES = {
    "x": RANDOM.normal(size=(8, 3)),
    "label": RANDOM.normal(size=8),
    "weight": RANDOM.uniform(0.2, 3, 8),
    "positive": RANDOM.integers(0, 4, (8, 6)),
}
POSITIVES = lambda rows: tf.reduce_sum(rows["positive"], axis=1)  # noqa: E731
# What `denominator` returns, and the number of a global batch.
KINDS = {
    "batch": (lambda rows: "batch", lambda rows: len(rows["x"])),
    "none": (lambda rows: "none", lambda rows: 1.0),
    "positives": (POSITIVES, lambda rows: rows["positive"].sum()),
    "weights": (lambda rows: "weights", lambda rows: rows["weight"].sum()),
    "zero": (lambda rows: 0 * POSITIVES(rows), lambda rows: np.inf),
}


def build_model():
    dense = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", input_shape=[3])
    return tf_keras.Sequential([dense])


def losses(batch, outputs):
    return (outputs[:, 0] - batch["label"]) ** 2


class Divided(one_batch.Trainer):
    EXAMPLES = EXAMPLES
    kind = "batch"

    def build_model(self):
        return build_model()

    def forward(self, batch, training):
        return self.model(batch["x"])

    def per_example_loss(self, batch, outputs):
        return losses(batch, outputs)

    def denominator(self, batch):
        return KINDS[self.kind][0](batch)


class Minimized(Divided):
    def denominator(self, batch):
        return "batch"

    def replica_step(self, batch):
        return self.minimize(
            batch,
            lambda rows: losses(rows, self.model(rows["x"])),
            denominator=KINDS[self.kind][0](batch),
        )


def expected(kind, batch):
    """The loss of the global batch at the first weights, and its gradient."""
    rows = {name: values[:batch] for name, values in EXAMPLES.items()}
    errors, weights = rows["x"].sum(axis=1) - rows["label"], rows["weight"]
    number = KINDS[kind][1](rows)
    gradient = (2 * weights * errors) @ rows["x"] / number
    return (weights * errors**2).sum() / number, gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("cls", "batch", "replicas", "options"),
    [
        (Divided, 5, 1, {}),
        (Minimized, 8, 2, {"micro_batches": 2}),
        (Minimized, 5, 4, {}),
        (Divided, 8, 2, {"logical_shards": 4}),
    ],
)
def test_a_loss_is_divided_once_by_the_number_of_the_global_batch(
    kind, cls, batch, replicas, options, caplog
):
    trainer = one_batch.make(type("", (cls,), {"kind": kind}), batch, replicas, **options)
    loss, gradient = expected(kind, batch)
    assert float(trainer.train(tf.constant(1))["loss"]) == pytest.approx(loss, abs=1e-12)
    moved = 1 - trainer.model.get_weights()[0][:, 0]
    np.testing.assert_allclose(moved, gradient, rtol=0, atol=1e-12)
    assert not caplog.text


@pytest.mark.parametrize("kind", ["none", "positives"])
def test_a_step_of_ones_own_loop_and_its_evaluation_have_it_too(kind):
    given, number = KINDS[kind]
    step = ctl.Step(
        build_model,
        lambda: tf_keras.optimizers.SGD(0.0),
        losses,
        forward=lambda batch, training: step.model(batch["x"]),
        denominator=given if kind == "positives" else kind,
        global_batch_size=5,
        strategy=one_batch.strategy(2),
        precision="float64",
    )
    batches = tf.data.Dataset.from_tensor_slices(EXAMPLES).batch(5)
    batch = next(iter(step.strategy.experimental_distribute_dataset(batches)))
    assert float(step(batch).loss) == pytest.approx(expected(kind, 5)[0], abs=1e-12)
    # An evaluation has one denominator for all rows; a sum is reported per row.
    total = expected("none", 8)[0] / (8 if kind == "none" else number(EXAMPLES))
    results = ctl.evaluate(step, ctl.data.arrays(EXAMPLES))
    assert float(results["loss"]) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(
    ("denominator", "message"),
    [
        (lambda rows: tf.reduce_sum(rows["positive"]), r"^denominator has shape \(\), but must be"),
        (lambda rows: "mean", '^denominator is \'mean\', but must be "weights", "batch", "none"'),
        (lambda rows: {"box": "batch"}, "^denominator names box, but the losses are one without a"),
        (lambda rows: POSITIVES(rows) / tf.reduce_max(POSITIVES(rows)), "same replica"),
    ],
)
def test_mistakes_are_one_line(denominator, message):
    cls = type("", (Divided,), {"denominator": lambda self, batch: denominator(batch)})
    with pytest.raises(ctl.UsageError, match=message):
        one_batch.make(cls, 5, 2).train(tf.constant(1))
