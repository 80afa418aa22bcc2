"""Statistics of measured windows, and their tables."""

import numpy as np

from benchmarks import report


def test_row_has_medians_and_ratios_of_paired_windows():
    rates = {"variant": [[20.0, 44.0], [30.0, 66.0]], "reference": [[10.0, 22.0], [20.0, 44.0]]}
    variant, reference = report.make_rows("m", 4, rates, reference="reference")
    assert variant.examples_per_second == 4 * 37
    assert (variant.ratio_low, variant.ratio, variant.ratio_high) == (1.5, 1.75, 2.0)
    assert (variant.windows, variant.processes) == (4, 2)
    assert reference.ratio == reference.ratio_low == reference.ratio_high == 1


def test_interval_of_a_noisy_ratio_contains_the_ratio():
    ratios = 1.2 + 0.1 * np.random.default_rng(1).normal(size=(3, 20))
    ratio, low, high = report.interval(ratios)
    assert low < 1.2 < high and low < ratio < high and high - low < 0.1


def test_pages_show_how_many_times_as_fast_the_reference_is():
    rates = {"ctl": [[2.0, 6.0, 8.0]], "jax": [[4.0, 8.0, 4.0]]}
    rows = report.make_rows("m", 4, rates, "ctl")
    rows += report.make_rows("where JAX failed", 4, {"ctl": [[1.0]]}, "ctl")
    tables = report.result_tables(rows, "ctl", {"ctl": "ctl", "jax": "JAX", "torch": "PyTorch"})
    assert tables["speed"].rows == [["ctl", 24, 4], ["JAX", 16, None]]
    assert tables["ratio"].rows == [["JAX", [0.75, 0.5, 2.0], None]]
