"""A step that fails names the rows that make it fail."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.errors import NonFiniteStep, UsageError
from tests.support import one_batch

COUNT, BAD = 16, 11
X = np.random.RandomState(0).randn(COUNT, 3)
LABELS = np.arange(COUNT) % 3


def cross_entropy(batch, outputs):
    loss = tf_keras.losses.sparse_categorical_crossentropy
    return loss(batch["label"], outputs, from_logits=True)


class Classifier(one_batch.Trainer):
    x, labels = X, LABELS

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": self.x, "label": self.labels})

    def per_example_loss(self, batch, outputs):
        return cross_entropy(batch, outputs)


def changed(values, value):
    values = values.copy()
    values[BAD] = value
    return values


class Divides(Classifier):
    x = changed(X, 0.0)

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs) / tf.abs(batch["x"][:, 0])


class DatasetOfNaN(Classifier):
    def build_dataset(self, split, input_context):
        x = changed(X, np.nan)
        return tf.data.Dataset.from_tensor_slices({"x": x, "label": self.labels})


@pytest.mark.parametrize(
    ("cls", "replicas", "place"),
    [
        (type("NaN", (Classifier,), {"x": changed(X, np.nan)}), 4, "example 11"),
        (Divides, 1, "example 11"),
        (Divides, 2, "example 11"),
        (DatasetOfNaN, 1, "row 11"),
    ],
)
def test_rows_that_are_not_finite_by_themselves_are_named(cls, replicas, place):
    trainer = one_batch.make(cls, COUNT, replicas)
    with pytest.raises(NonFiniteStep) as error:
        trainer.train(tf.constant(2))
    line = f"on the {place}, whose own features or loss are not finite."
    assert line in str(error.value)


def test_all_examples_are_listed_if_none_is_worse_than_the_others():
    class Huge(Classifier):
        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, outputs) * np.inf

    with pytest.raises(NonFiniteStep, match=r"on the examples (\d+, ){8}\.\.\.\. No"):
        one_batch.make(Huge, COUNT, 1).train(tf.constant(1))


@pytest.mark.parametrize("replicas", [1, 4])
def test_label_that_is_no_class_is_named_with_its_example(replicas):
    cls = type("Wrong", (Classifier,), {"labels": changed(LABELS, 7)})
    trainer = one_batch.make(cls, 8, replicas)
    with pytest.raises(UsageError) as error:
        trainer.train(tf.constant(2))
    line = "The label of example 11 is 7, outside of the classes 0 to 2 that the outputs have: "
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("replicas", "own", "place"), [(1, True, "row 3 of the batch"), (4, False, "example 11")]
)
def test_step_names_the_example_of_a_label_that_is_no_class(replicas, own, place):
    strategy, examples = one_batch.strategy(replicas), {"x": X, "label": changed(LABELS, 7)}
    step = ctl.Step(
        lambda: tf_keras.Sequential([tf_keras.layers.Dense(3)]),
        lambda: tf_keras.optimizers.SGD(0.01),
        cross_entropy,
        global_batch_size=8,
        strategy=strategy,
    )
    if own:
        batches = iter(tf.data.Dataset.from_tensor_slices(examples).batch(8))
    else:
        batches = iter(ctl.data.distribute(ctl.data.arrays(examples), 8, strategy))
    with pytest.raises(UsageError, match=f"The label of {place} is 7, outside"):
        for _ in range(2):  # an epoch
            step(next(batches))


def one_bad(name):
    """One example has NaN in a feature, or a label whose logarithm is not finite."""
    rng = np.random.default_rng(0)
    values = {"x": rng.uniform(1, 2, (16, 3)), "label": rng.uniform(1, 2, (16, 1))}
    values[name][BAD] = np.nan if name == "x" else 0.0
    return values


def logarithmic(batch, outputs):
    return tf.reduce_sum((tf.math.log(batch["label"]) - outputs) ** 2, axis=1)


@pytest.mark.parametrize(
    ("name", "replicas"), [("x", 1), ("label", 4), pytest.param("x", 2, marks=pytest.mark.slow)]
)
def test_step_and_evaluation_name_the_example(name, replicas, caplog):
    strategy, source = one_batch.strategy(replicas), ctl.data.arrays(one_bad(name))
    step = ctl.Step(
        lambda: tf_keras.Sequential([tf_keras.layers.Dense(1)]),
        lambda: tf_keras.optimizers.SGD(0.01),
        logarithmic,
        global_batch_size=8,
        strategy=strategy,
        precision="float64",
    )
    batches = iter(ctl.data.distribute(source, 8, strategy))
    for _ in range(2):  # an epoch
        step(next(batches))
    assert int(step.results()["skipped_steps"]) == 1
    (line,) = caplog.messages
    assert f"not finite: the loss is first, on the example {BAD}, whose own features" in line
    step.results()
    assert caplog.messages == [line]  # once
    assert not np.isfinite(ctl.evaluate(step, source)["loss"])
    assert caplog.messages[1:] == [
        "The loss of the evaluation of eval is not finite: the features or the loss of example "
        f"{BAD} are not finite."
    ]


class Logarithmic(one_batch.Trainer):
    EXAMPLES = one_bad("x")

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(1)])

    def per_example_loss(self, batch, outputs):
        return logarithmic(batch, outputs)


def test_evaluator_names_the_example(caplog):
    evaluator = ctl.StandardEvaluator(one_batch.make(Logarithmic, 8, 1), global_batch_size=6)
    assert np.isnan(float(evaluator.evaluate(tf.constant(-1))["loss"]))
    assert f"the features or the loss of example {BAD} are not finite" in caplog.text


class Endless(Logarithmic):
    def build_dataset(self, split, input_context):
        return super().build_dataset(split, input_context).repeat()


class OwnResults(ctl.StandardEvaluator):
    def eval_end(self):
        return {"loss": {"first": 1.0}}


def test_endless_data_and_results_of_the_user_are_evaluated(caplog):
    evaluator = ctl.StandardEvaluator(one_batch.make(Endless, 8, 1), global_batch_size=6)
    assert np.isnan(float(evaluator.evaluate(tf.constant(9))["loss"]))
    assert f"example {BAD} " in caplog.text
    evaluator = OwnResults(one_batch.make(Logarithmic, 8, 1), global_batch_size=6)
    assert evaluator.evaluate(tf.constant(1)) == {"loss": {"first": 1.0}}
