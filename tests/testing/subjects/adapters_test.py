"""Trainers of Orbit and compiled models of both versions of Keras are loops."""

import keras
import pytest
import tf_keras

from benchmarks.comparisons import tutorials
from ctl.testing import check_loop_equivalence
from ctl.testing.diagnosis import causes

X, LABEL = tutorials.examples()
AVERAGED = causes.OWN_ROWS.format(how="averaged")


@pytest.mark.parametrize(
    ("build", "examples"),
    [
        pytest.param(tutorials.orbit_example, {"x": X, "label": LABEL}, id="orbit"),
        pytest.param(tutorials.fit(tf_keras), (X, LABEL), id="tf_keras", marks=pytest.mark.slow),
        pytest.param(tutorials.fit(keras), (X, LABEL), id="keras_3", marks=pytest.mark.slow),
    ],
)
def test_uneven_batches_reveal_a_mean_of_means(build, examples):
    report = check_loop_equivalence(
        build, examples, replicas=(2,), batch_sizes=(4, 5), steps=2, in_process=True
    )
    assert report.precision == "float64"
    assert {str(d.split) for d in report.differences} == {"2 replicas (3 + 2 rows)"}
    assert report.cause == AVERAGED
