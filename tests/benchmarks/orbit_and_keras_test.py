"""The numbers of docs/compared.md about Orbit and tf_keras."""

import pytest

from benchmarks.comparisons import orbit_and_keras


@pytest.mark.slow
def test_numbers_of_the_page():
    assert orbit_and_keras.orbit_intervals() == ([5, 11, 17, 20], [6, 12, 18, 20])
    assert orbit_and_keras.expected_boundaries(4) == [4, 8, 12, 16, 20]
    assert orbit_and_keras.orbit_best_after_nan() == [False, True, True]
    assert orbit_and_keras.keras_patience_after_restart() == (4, 20)
