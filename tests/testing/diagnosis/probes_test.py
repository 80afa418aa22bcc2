"""Rows and coefficients are those of the trainer's global batch."""

import numpy as np
import pytest

from ctl.configs.options import TrainerOptions
from ctl.testing import make_strategy, tiny_trainer
from ctl.testing.diagnosis import probes
from ctl.testing.recording import record_run
from ctl.testing.splits import Split
from ctl.testing.trial_spec import TrialSpec, build_trainer
from tests.testing import gallery, mistakes

SPLIT = Split(5, replicas=2)


def make_spec(cls):
    return TrialSpec(cls, gallery.examples(), None, TrainerOptions(), steps=1)


def test_rows_are_in_the_order_of_the_global_batch():
    spec = make_spec(gallery.Weighted)
    reference = probes.compute_rows(spec, SPLIT.reference, "float64")
    rows = probes.compute_rows(spec, SPLIT, "float64")
    np.testing.assert_allclose(rows.outputs[0], reference.outputs[0], rtol=1e-12)
    np.testing.assert_allclose(rows.losses, reference.losses, rtol=1e-12)
    np.testing.assert_array_equal(rows.weights, 1.0 + gallery.examples()["label"][:5])
    assert [values[0].shape for values in rows.by_replica] == [(3, 3), (3, 3)]  # one is padding


def test_rows_of_a_trainer_that_raises_are_unknown():
    class NoLoss(gallery.Right):
        def per_example_loss(self, batch, outputs):
            raise NotImplementedError

    assert probes.compute_rows(make_spec(NoLoss), SPLIT, "float64") is None


@pytest.mark.parametrize(
    ("cls", "rows"),
    [
        pytest.param(gallery.Right, [1, 1, 1, 1, 1], marks=pytest.mark.slow),
        (mistakes.PaddingCounted, [1, 1, 1, 1, 2]),
    ],
)
def test_coefficients_are_how_much_each_row_counts(cls, rows):
    spec = make_spec(cls)
    reference, record = (
        record_run(build_trainer(spec, s, precision="float64"), s, steps=1)
        for s in (SPLIT.reference, SPLIT)
    )
    # Keras numbers the layers of each trainer differently.
    renamed = {
        (kind, name): value
        for (kind, name), value in zip(reference.steps[0], record.steps[0].values(), strict=True)
    }
    record = type(record)(**{**vars(record), "steps": [renamed], "names": reference.names})
    decomposition = probes.Decomposition(spec, SPLIT.batch, "float64")
    coefficients = decomposition.coefficients(record, reference)
    np.testing.assert_allclose(coefficients.rows, rows, rtol=1e-6)
    assert coefficients.penalty == 1
    np.testing.assert_allclose(coefficients.extra_decay, 0, atol=1e-9)


def test_metrics_of_selected_rows():
    results = probes.metrics_of_rows(make_spec(gallery.Right), 5, "float64", [[0], [0, 1, 2, 3, 4]])
    assert results[0]["accuracy"] in (0, 1)
    assert round(float(results[1]["accuracy"]) * 5, 4) in range(6)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_dtype_of_the_computation_is_recognized(precision):
    trainer = tiny_trainer(make_strategy(1), precision=precision)
    narrow = {"float64": "", "float32": "forward returns float32"}
    assert probes.find_narrow(trainer) == narrow[precision]
