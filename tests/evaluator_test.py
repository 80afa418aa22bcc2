"""Evaluation: every example once, and the loss of the whole dataset."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.evaluator import Interrupted
from tests.support import one_batch, reference_model
from tests.support.checks import close
from tests.support.reference_model import as_dataset, as_global_batches


def by_hand(trainer, rows, weighted=True):
    """Loss and accuracy over all examples."""
    weights = trainer.model.get_weights()
    _, _, per_example = reference_model.loss_and_gradients(weights, rows, weighted)
    weight = rows["weight"] if weighted else np.ones(len(per_example))
    logits = trainer.model({name: tf.constant(rows[name]) for name in ("x", "token")}).numpy()
    return (per_example * weight).sum() / weight.sum(), (logits.argmax(1) == rows["label"]).mean()


class WeightedTraining(reference_model.ReferenceTrainer):
    def sample_weight(self, batch, training):
        return batch["weight"] if training else None


def test_weights_of_training_do_not_count_in_an_evaluation():
    rows = reference_model.examples()
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), reference_model.EXAMPLES, cls=WeightedTraining
    )
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=30)  # more than there are examples
    unweighted, accuracy = by_hand(trainer, rows, weighted=False)
    results = evaluator.evaluate(tf.constant(-1))
    assert float(results["loss"]) == pytest.approx(unweighted, abs=1e-12)
    assert float(results["accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    weighted, _, _ = reference_model.loss_and_gradients(trainer.model.get_weights(), rows)
    assert float(trainer.train(tf.constant(1))["loss"]) == pytest.approx(weighted, abs=1e-12)
    assert abs(weighted - unweighted) > 1e-3


def test_loss_and_metrics_are_those_of_the_whole_dataset():
    trainer = make_trainer(as_global_batches, 2)
    evaluator = ctl.StandardEvaluator(trainer)
    loss, accuracy = by_hand(trainer, reference_model.examples())
    for _ in range(2):  # a second evaluation counts afresh
        results = evaluator.evaluate(tf.constant(-1))
        assert results["examples"].numpy() == reference_model.EXAMPLES
        assert float(results["loss"]) == pytest.approx(loss, abs=1e-12)
        assert float(results["accuracy"]) == pytest.approx(accuracy, abs=1e-6)


def evaluate(evaluator, steps=-1):
    results = evaluator.evaluate(tf.constant(steps))
    return int(results["examples"]), float(results["loss"])


def test_each_evaluation_begins_at_the_first_example():
    trainer = reference_model.make_trainer(testing.make_strategy(2), 8)
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=5)
    rows = reference_model.examples()
    losses = {count: by_hand(trainer, reference_model.pick(rows, np.arange(count)))[0]
              for count in (10, 23)}  # fmt: skip
    for steps, count in ((2, 10), (2, 10), (-1, 23), (-1, 23), (2, 10), (7, 23), (-1, 23)):
        expected = (count, pytest.approx(losses[count], abs=1e-12))
        assert evaluate(evaluator, steps) == expected
    (kept,) = evaluator._iterators.values()  # TensorFlow takes milliseconds to make another one
    assert evaluate(evaluator) == expected and [*evaluator._iterators.values()] == [kept]
    one_by_one = ctl.StandardEvaluator(trainer, global_batch_size=1)
    with pytest.raises(Interrupted):
        one_by_one.evaluate(tf.constant(-1), stop=lambda: True)
    assert evaluate(one_by_one) == expected
    own = as_dataset("eval").take(10).batch(10)
    evaluator.eval_dataset = trainer.strategy.experimental_distribute_dataset(own)
    assert evaluate(evaluator) == (10, pytest.approx(losses[10], abs=1e-12))


class Changing(type(ctl.data.arrays({"x": [0]}))):
    """Examples that the program replaces between two evaluations."""

    scale = 1.0

    def gather(self, indexes):
        rows = super().gather(indexes)
        scale = tf.numpy_function(lambda: np.float64(self.scale), [], tf.float64, stateful=True)
        return {**rows, "x": rows["x"] * tf.ensure_shape(scale, [])}


def test_examples_that_a_source_reads_are_those_of_the_time_of_the_evaluation():
    data = Changing(reference_model.examples())
    trainer = make_trainer(lambda split: data)
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=8)
    first = evaluate(evaluator)
    data.scale = 0.5
    rows = reference_model.examples()
    loss, _ = by_hand(trainer, {**rows, "x": rows["x"] * 0.5})
    assert evaluate(evaluator) == (23, pytest.approx(loss, abs=1e-12))
    assert abs(first[1] - loss) > 1e-3


class Power(tf_keras.layers.Layer):
    """Divides by the largest singular value of a matrix, which every call estimates better."""

    def build(self, shape):
        self.matrix = self.add_weight(name="matrix", shape=(int(shape[-1]), 4))
        self.u = self.add_weight(name="u", shape=[4], initializer="ones", trainable=False)

    def call(self, inputs):
        v = tf.math.l2_normalize(tf.linalg.matvec(self.matrix, self.u))
        self.u.assign(tf.math.l2_normalize(tf.linalg.matvec(self.matrix, v, transpose_a=True)))
        return inputs @ self.matrix / tf.tensordot(v, tf.linalg.matvec(self.matrix, self.u), 1)


class Assigning(one_batch.Trainer):
    """A layer, the loss and the code of the metrics assign variables in every call."""

    EXAMPLES: ClassVar = {
        "x": np.random.default_rng(1).normal(size=(13, 3)),
        "label": np.random.default_rng(2).normal(size=13),
    }

    def build_model(self):
        self.decay, self.count = (
            tf.Variable(tf.ones([], tf.float64), trainable=False, aggregation=FIRST)
            for _ in range(2)
        )
        dropout, dense = tf_keras.layers.Dropout(0.5), tf_keras.layers.Dense(1)
        return tf_keras.Sequential([tf_keras.Input([3]), Power(), dropout, dense])

    def per_example_loss(self, batch, outputs):
        losses = (outputs[:, 0] - batch["label"]) ** 2 * self.decay
        self.decay.assign(0.9 * self.decay)
        return losses

    def update_metrics(self, metrics, batch, outputs, weights):
        self.count.assign_add(1.0)


FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


def test_evaluation_leaves_the_variables_that_its_code_assigns(caplog):
    """Nor does dropout have an effect."""
    trainer, losses = one_batch.make(Assigning, 5, 2), []
    trainer.optimizer.learning_rate = 0.05
    evaluator = ctl.StandardEvaluator(trainer)

    def values():
        variables = [trainer.decay, trainer.count, trainer.global_step]
        variables += [*trainer.model.variables, *trainer.optimizer.variables]
        return [testing.copies(trainer.strategy, variable) for variable in variables]

    for _ in range(2):
        trainer.train(tf.constant(1))
        before = values()
        for _ in range(2):
            losses.append(float(evaluator.evaluate(tf.constant(-1))["loss"]))
            close(values(), before)
    assert losses[0] == losses[1] != losses[2] == losses[3]
    assert "has its old value again afterwards: use a metric of build_metrics" in caplog.text


def test_evaluation_that_assigns_a_variable_of_nobody_is_rejected():
    count = tf.Variable(0.0)

    class Counting(reference_model.ReferenceTrainer):
        def forward(self, batch, training):
            count.assign_add(1.0)
            return super().forward(batch, training)

    trainer = reference_model.make_trainer(tf.distribute.get_strategy(), 8, cls=Counting)
    with pytest.raises(ctl.UsageError, match=r"evaluator_test.py:\d+ assigns"):
        ctl.StandardEvaluator(trainer).evaluate(tf.constant(1))


def test_rows_of_weight_zero_alone_give_loss_zero_and_are_counted():
    class Weightless(reference_model.ReferenceTrainer):
        def sample_weight(self, batch):
            return tf.zeros_like(batch["weight"])

    trainer = reference_model.make_trainer(testing.make_strategy(2), 8, cls=Weightless)
    assert evaluate(ctl.StandardEvaluator(trainer)) == (reference_model.EXAMPLES, 0.0)


class DividedBySquares(reference_model.ReferenceTrainer):
    """The loss of a row of zeros is NaN; the second batch has one row."""

    weighted = False

    @staticmethod
    def data_factory(split):
        return ctl.data.GlobalBatches(as_dataset(split).batch(22))

    def per_example_loss(self, batch, outputs):
        squares = tf.reduce_sum(tf.square(batch["x"]), 1)
        return super().per_example_loss(batch, outputs) * (squares / squares)


def test_replica_without_rows_adds_no_loss_of_its_padding():
    trainer = reference_model.make_trainer(testing.make_strategy(2), 22, cls=DividedBySquares)
    loss, _ = by_hand(trainer, reference_model.examples(), weighted=False)
    assert evaluate(ctl.StandardEvaluator(trainer)) == (23, pytest.approx(loss, abs=1e-12))


def test_data_after_an_evaluation_of_several_splits_is_that_of_the_first(monkeypatch):
    def parts(split):
        rows = reference_model.examples()
        size = {"train": 23, "eval": 5, "test": 3}[split]
        return ctl.data.arrays({name: values[:size] for name, values in rows.items()})

    trainer = make_trainer(parts)
    evaluator = ctl.StandardEvaluator(trainer, splits=("eval", "test"))
    pipeline, named = loop_of(trainer).pipeline, []
    report = pipeline.report_errors
    monkeypatch.setattr(
        pipeline,
        "report_errors",
        lambda kind, split, find: named.append(split) or report(kind, split, find),
    )
    outputs = evaluator.evaluate(tf.constant(-1))
    assert named == ["eval", "test"]  # whose data an error names
    assert [int(outputs[split]["examples"]) for split in ("eval", "test")] == [5, 3]
    first = next(iter(evaluator.eval_dataset))
    expected = next(iter(ctl.StandardEvaluator(trainer).eval_dataset))
    close(tf.nest.flatten(first), tf.nest.flatten(expected))


def make_trainer(data_factory, replicas=1, **methods):
    names = {"data_factory": staticmethod(data_factory), **methods}
    cls = type("Other", (reference_model.ReferenceTrainer,), names)
    return reference_model.make_trainer(testing.make_strategy(replicas), 8, cls=cls)


def make_evaluator(data_factory, replicas=1, **methods):
    return ctl.StandardEvaluator(
        make_trainer(data_factory, replicas, **methods), global_batch_size=5
    )


def forward_selected(self, batch, training):
    """The features that the model accepts."""
    return self.model({name: batch[name] for name in ("x", "token")}, training=training)


def test_endless_or_empty_evaluation_data_is_refused():
    endless = make_evaluator(lambda split: as_dataset(split).repeat())
    empty = make_evaluator(lambda split: as_dataset(split).filter(lambda _: split == "train"))
    for call, message in (
        (endless.check_data, "never ends"),  # without reading it
        (lambda: evaluate(endless), "never ends"),
        (lambda: evaluate(empty), "empty"),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            call()


def test_evaluation_data_of_another_shape_is_rejected_without_reading_it():
    def narrow(split):
        width = None if split == "train" else reference_model.FEATURES - 1
        return as_dataset(split).map(lambda rows: {**rows, "x": rows["x"][:width]})

    evaluator = make_evaluator(narrow, 2)
    with pytest.raises(ctl.UsageError) as error:
        evaluator.check_data()
    assert "x is float64 (3,) instead of float64 (4,)" in str(error.value)
    assert "\n" not in str(error.value)


def test_evaluation_data_with_other_features_that_the_model_accepts_is_evaluated():
    def with_another_feature(split):
        return as_dataset(split).map(lambda rows: {**rows, "more": 1} if split == "eval" else rows)

    evaluator = make_evaluator(with_another_feature, forward=forward_selected)
    evaluator.check_data()
    loss, _ = by_hand(evaluator.trainer, reference_model.examples())
    assert evaluate(evaluator) == (23, pytest.approx(loss, abs=1e-12))


def test_own_evaluation_data_may_be_tuples_and_have_a_mask_of_bools():
    rows = reference_model.examples(10)
    features = {name: rows[name] for name in ("x", "token")}
    evaluator = make_evaluator(as_dataset, 2)
    for elements, count in (
        ((features, rows["label"], rows["weight"]), 10),
        ((rows, np.arange(10) < 6), 6),
    ):
        evaluator.eval_dataset = evaluator.strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(elements).batch(4)
        )
        loss, _ = by_hand(evaluator.trainer, reference_model.pick(rows, np.arange(count)))
        assert evaluate(evaluator) == (count, pytest.approx(loss, abs=1e-12))


class ColumnLabels(reference_model.ReferenceTrainer):
    """A metric that requires the same dtype of labels, outputs and weights."""

    def build_metrics(self):
        return {"r2": tf_keras.metrics.R2Score(dtype=self.variable_dtype)}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["r2"].update_state(batch["x"][:, :1], outputs[:, :1], sample_weight=weights)


def test_metric_in_float64_accepts_the_mask_in_training_and_evaluation():
    """23 rows on 2 replicas are 12 + 11."""
    batch = reference_model.EXAMPLES  # the one batch of an epoch
    trainer = reference_model.make_trainer(testing.make_strategy(2), batch, cls=ColumnLabels)
    rows = reference_model.examples()
    results = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    inputs = {"x": tf.constant(rows["x"]), "token": tf.constant(rows["token"])}
    outputs = trainer.model(inputs).numpy()[:, 0]
    labels = rows["x"][:, 0]
    r2 = 1 - np.sum((labels - outputs) ** 2) / np.sum((labels - labels.mean()) ** 2)
    assert float(results["r2"]) == pytest.approx(r2, rel=1e-12)
    assert float(trainer.train(tf.constant(1))["r2"]) == pytest.approx(r2, rel=1e-12)


class NoLoss(reference_model.ReferenceTrainer):
    per_example_loss = ctl.StandardTrainer.per_example_loss


class OwnUpdates(NoLoss):
    """Has no loss that evaluation could report."""

    def replica_step(self, batch):
        return self.minimize(batch, lambda rows: self.forward(rows, training=True)[:, 0])


def test_trainer_without_per_example_loss_is_evaluated_by_its_metrics():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 5, cls=OwnUpdates)
    results = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    _, accuracy = by_hand(trainer, reference_model.examples())
    assert results.keys() == {"accuracy", "examples"}
    assert float(results["accuracy"]) == pytest.approx(accuracy, abs=1e-12)
    with pytest.raises(ctl.UsageError, match=r"no loss.*per_example_loss"):
        reference_model.make_trainer(testing.make_strategy(1), 5, cls=NoLoss)
