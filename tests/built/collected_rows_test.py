"""Values of every example for metrics that are not sums over batches."""

import types

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.built.collected_rows import CollectedRows, check_values
from tests.support import reference_model
from tests.support.reference_model import as_global_batches, of_unknown_size

SEEN = []


class Ranking(reference_model.ReferenceTrainer):
    """Collects the label, the score and the position of each example."""

    def collect_outputs(self, batch, outputs):
        return {"score": outputs[:, 0], "label": batch["label"], "x": batch["x"]}

    def compute_metrics(self, collected):
        SEEN.append(collected)
        positive = collected["score"][collected["label"] == 0]
        negative = collected["score"][collected["label"] != 0]
        return {"auc": (positive[:, None] > negative).mean()}


@pytest.mark.parametrize(
    ("make", "replicas"),
    [(of_unknown_size, 2), pytest.param(as_global_batches, 4, marks=pytest.mark.slow)],
)
def test_every_example_is_collected_once_in_the_order_of_the_data(make, replicas):
    cls = type("Collecting", (Ranking,), {"data_factory": staticmethod(make)})
    trainer = reference_model.make_trainer(testing.make_strategy(replicas), 8, cls=cls)
    SEEN.clear()
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=7)
    outputs = [evaluator.evaluate(tf.constant(-1)) for _ in range(2)]
    rows = reference_model.examples()
    for collected in SEEN:
        np.testing.assert_array_equal(collected["x"], rows["x"])
        np.testing.assert_array_equal(collected["label"], rows["label"])
        scores = trainer.model({k: tf.constant(rows[k]) for k in ("x", "token")})[:, 0].numpy()
        np.testing.assert_allclose(collected["score"], scores, rtol=0, atol=1e-12)
    assert len(SEEN) == 2 and outputs[0]["auc"] == outputs[1]["auc"]
    label = rows["label"] == 0
    assert outputs[0]["auc"] == (scores[label][:, None] > scores[~label]).mean()
    assert {"loss", "accuracy"} < outputs[0].keys()
    assert int(outputs[0]["examples"]) == reference_model.EXAMPLES


def evaluate(**body):
    cls = type("Collecting", (Ranking,), body | {"collect_limit_mib": 0.0005})
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls)
    ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))


RAGGED = tf.RaggedTensor.from_row_lengths([1, 2], [1, 1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (tf.ones([2]), "collect_outputs returned an EagerTensor, but must return a dict"),
        ({"text": tf.constant(["a"])}, "returned strings for 'text', but replicas exchange"),
        ({"x": None}, r"returned None for 'x', but must return \[rows, \.\.\.\]"),
        ({"x": 1.0}, r"returned shape \(\) for 'x', but must return"),
        ({"x": tf.ones([3, 2])}, r"returned shape \(3, 2\) for 'x', but must return"),
        ({"text": RAGGED}, "returned a RaggedTensor for 'text': return a dense tensor"),
    ],
)
def test_values_that_cannot_be_collected_are_rejected(values, message):
    with pytest.raises(ctl.UsageError, match=message):
        check_values(values, 2)


@pytest.mark.parametrize(
    ("collected", "metrics", "message"),
    [
        ("x", {}, r"The values of collect_outputs exceed 0\.0005 MiB, the limit collect_"),
        ("", {}, "collect_outputs returned a str, but must return a dict"),
        ("label", {"loss": 1.0}, "compute_metrics returned 'loss', which the evaluation has"),
        ("label", {"f1": "high"}, "compute_metrics returned a str for 'f1', but must return a"),
    ],
)
def test_mistakes_are_reported_in_one_line(collected, metrics, message):
    with pytest.raises(ctl.UsageError, match=message):
        evaluate(
            collect_outputs=lambda self, batch, outputs: (
                collected and {collected: batch[collected]}
            ),
            compute_metrics=lambda self, collected: metrics,
        )


def test_another_process_checks_the_limit_and_keeps_nothing():
    rows = CollectedRows(1e-5, types.SimpleNamespace(is_chief=False)).add({"score": tf.zeros([2])})
    assert rows.take() == {}
    with pytest.raises(ctl.UsageError, match="exceed 1e-05 MiB"):
        rows.add({"score": tf.zeros([2])})
