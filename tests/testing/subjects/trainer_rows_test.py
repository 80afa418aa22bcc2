"""Rows and coefficients are those of the trainer's global batch."""

import numpy as np
import pytest

from ctl.testing import make_strategy, tiny_trainer
from ctl.testing.diagnosis.update_rules import solve
from ctl.testing.splits import Split
from ctl.testing.subjects import trainer_rows
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery, mistakes

SPLIT = Split(5, replicas=2)


def make_subject(cls):
    return TrainerSubject(cls, gallery.examples(), 1)


def test_rows_are_in_the_order_of_the_global_batch():
    subject = make_subject(gallery.Weighted)
    reference, rows = subject.rows(SPLIT.reference), subject.rows(SPLIT)
    np.testing.assert_allclose(rows.outputs[0], reference.outputs[0], rtol=1e-12)
    np.testing.assert_allclose(rows.losses, reference.losses, rtol=1e-12)
    np.testing.assert_array_equal(rows.weights, 1.0 + gallery.examples()["label"][:5])
    assert [values[0].shape for values in rows.by_replica] == [(3, 3), (3, 3)]  # one is padding


def test_rows_of_a_trainer_that_raises_are_unknown():
    class NoLoss(gallery.Right):
        def per_example_loss(self, batch, outputs):
            raise NotImplementedError

    assert make_subject(NoLoss).rows(SPLIT) is None


class PaddingCounted(mistakes.PaddingCounted, gallery.ByHand):
    pass


@pytest.mark.parametrize(
    ("cls", "rows"),
    [
        pytest.param(gallery.Right, [1, 1, 1, 1, 1], marks=pytest.mark.slow),
        (PaddingCounted, [1, 1, 1, 1, 2]),
    ],
)
def test_coefficients_are_how_much_each_row_counts(cls, rows):
    subject = make_subject(cls)
    reference = subject.start(SPLIT.reference).record()
    record = subject.start(SPLIT).record(reference.names)
    coefficients = solve(subject.terms(SPLIT.batch, reference.names), record, reference)
    np.testing.assert_allclose(coefficients.rows, rows, rtol=1e-6)
    assert (coefficients.penalty, coefficients.decay) == (1, 1)


def test_metrics_of_selected_rows():
    subject = make_subject(gallery.Right)
    assert subject.metrics([0], 1)[0] in (0, 1)
    assert round(float(subject.metrics(range(5), 1)[0]) * 5, 4) in range(6)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_dtype_of_the_computation_is_recognized(precision):
    trainer = tiny_trainer(make_strategy(1), precision=precision)
    narrow = {"float64": "", "float32": "forward returns float32"}
    assert trainer_rows.find_narrow(trainer) == narrow[precision]
