"""Metrics that a model updates itself: the rows that exist, apart from those of an evaluation."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.support import one_batch
from tests.support.checks import one_line

RNG = np.random.default_rng(4)
ROWS = {"x": RNG.normal(size=(13, 3)), "label": RNG.normal(size=(13, 1))}


class Observed(tf_keras.layers.Layer):
    """Holds a metric, and adds others in `call`."""

    def __init__(self):
        super().__init__(name="observed")
        self.error = tf_keras.metrics.MeanAbsoluteError(name="loss")  # the name of another result

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[3], initializer="ones")

    def call(self, inputs):
        self.error.update_state(inputs[:, :1], inputs[:, 1:2])
        self.add_metric(tf.reduce_max(inputs, axis=1), name="rows")
        self.add_metric(tf.reduce_mean(inputs), name="mean")
        self.add_metric(tf.norm(self.scale), name="norm")
        self.add_metric(tf.math.reduce_std(inputs), name="deviation")
        return inputs * self.scale


class Trainer(one_batch.Trainer):
    EXAMPLES: ClassVar = ROWS

    def build_model(self):
        x = tf_keras.Input([3])
        outputs = tf_keras.layers.Dense(1)(Observed()(x))
        model = tf_keras.Model(x, outputs)
        model.add_metric(x[:, 0], name="first", aggregation="mean")
        return model

    def per_example_loss(self, batch, outputs):
        return (outputs - batch["label"])[:, 0] ** 2


def by_hand(x):
    return {
        "observed_loss": np.abs(x[:, 0] - x[:, 1]).mean(),
        "rows": x.max(axis=1).mean(),
        "mean": x.mean(),
        "norm": 3**0.5,
        "first": x[:, 0].mean(),
    }


def numbers(results):
    known = {"loss", "examples", "skipped_steps"}
    return {name: float(value) for name, value in results.items() if name not in known}


@pytest.mark.parametrize(("replicas", "options"), [(2, {"micro_batches": 2}), (1, {})])
def test_metrics_of_layers_are_those_of_the_rows_that_exist(replicas, options, caplog):
    trainer = one_batch.make(Trainer, 5, replicas, **options)
    trainer.optimizer.learning_rate = 0.0
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=4)  # 4 + 4 + 4 + 1 rows
    for rows in (ROWS["x"][:5], ROWS["x"][5:10]):
        trained = numbers(trainer.train(tf.constant(1)))
        deviation = {} if replicas > 1 else {"deviation": rows.std()}
        assert trained == pytest.approx(by_hand(rows) | deviation, abs=1e-12)
        for _ in range(2):
            evaluated = numbers(evaluator.evaluate(tf.constant(-1)))
            assert evaluated == pytest.approx(by_hand(ROWS["x"]), abs=1e-12)
    assert "Metric 'deviation' of layer observed is not reported" in caplog.text


class SizeOfRows(tf_keras.layers.Layer):
    """Adds metrics of two values, as many as a replica has rows."""

    def build(self, shape):
        numbers = np.arange(6.0).reshape(3, 2)
        self.kernel = self.add_weight(
            name="kernel", shape=[3, 2], initializer=tf.constant_initializer(numbers)
        )

    def call(self, inputs):
        outputs = inputs @ self.kernel
        self.add_metric(tf.norm(self.kernel, axis=0), name="norm")
        self.add_metric(tf.reduce_mean(outputs, axis=0), name="features")
        self.add_metric(outputs[:, 0], name="rows")
        return tf.reduce_sum(outputs, axis=1, keepdims=True)


class SizeOfRowsTrainer(Trainer):
    def build_model(self):
        return tf_keras.Sequential([SizeOfRows()])


@pytest.mark.parametrize(("replicas", "options"), [(4, {}), (1, {"micro_batches": 3})])
def test_values_whose_number_is_that_of_the_rows_are_not_taken_for_rows(replicas, options):
    """5 rows are 2 + 2 + 1 + 0 on four replicas, and 1 + 2 + 2 in three micro-batches."""
    trained = numbers(
        one_batch.make(SizeOfRowsTrainer, 5, replicas, **options).train(tf.constant(1))
    )
    kernel = np.arange(6.0).reshape(3, 2)
    outputs = ROWS["x"][:5] @ kernel
    expected = {
        "norm": np.linalg.norm(kernel, axis=0).mean(),
        "features": outputs.mean(),
        "rows": outputs[:, 0].mean(),
    }
    assert trained == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_evaluation_keeps_the_metrics_of_the_steps_before_it():
    strategy = one_batch.strategy(2)
    with strategy.scope():
        model, optimizer = Trainer.build_model(None), tf_keras.optimizers.SGD(0.0)
    step = ctl.Step(
        model,
        optimizer,
        lambda batch, outputs: (outputs - batch["label"])[:, 0] ** 2,
        global_batch_size=4,
        strategy=strategy,
    )
    data = ctl.data.arrays({k: v.astype(np.float32) for k, v in ROWS.items()})
    batches, seen = iter(ctl.data.distribute(data, 4, strategy)), []
    for _ in range(2):
        batch = next(batches)
        seen += [v.numpy() for v in strategy.experimental_local_results(batch[0]["x"])]
        step(batch)
        evaluated = ctl.evaluate(step, data)
        assert evaluated["mean"] == pytest.approx(ROWS["x"].mean(), abs=1e-6)
    expected = by_hand(np.concatenate(seen))
    assert numbers(step.results()) == pytest.approx(expected, abs=1e-6)


class FewWeights(tf_keras.layers.Layer):
    def build(self, shape):
        self.mean = tf_keras.metrics.Mean("mean")

    def call(self, inputs):
        self.mean.update_state(inputs[:, 0], sample_weight=tf.ones([2], inputs.dtype))
        return inputs


class FewWeightsTrainer(Trainer):
    def build_model(self):
        return tf_keras.Sequential([FewWeights(name="few"), tf_keras.layers.Dense(1)])


def test_other_number_of_weights_than_values_is_one_line():
    trainer = one_batch.make(FewWeightsTrainer, 4, 1)
    message = r"Metric 'mean' of layer few cannot be updated with the shapes \(4,\) and \(2,\)"
    with one_line(message):
        trainer.train(tf.constant(1))
