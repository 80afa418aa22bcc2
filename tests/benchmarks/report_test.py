"""Statistics of measured windows, and their table and JSON lines."""

import json

import numpy as np

from benchmarks import report


def test_row_has_medians_and_ratios_of_paired_windows():
    rates = {"variant": [[20.0, 44.0], [30.0, 66.0]], "reference": [[10.0, 22.0], [20.0, 44.0]]}
    peaks = {"variant": 90.0, "reference": 100.0}
    variant, reference = report.make_rows("m", 4, rates, peaks, reference="reference")
    assert variant.examples_per_second == 4 * 37
    assert variant.microseconds_per_step == 1e6 / 37
    assert (variant.ratio_low, variant.ratio, variant.ratio_high) == (1.5, 1.75, 2.0)
    assert (variant.windows, variant.processes) == (4, 2)
    assert reference.ratio == reference.ratio_low == reference.ratio_high == 1
    table = report.table([variant, reference], "reference")
    assert "| variant | 148 | 27,027 | 1.750 (1.500 to 2.000) | 90 |" in table


def test_interval_of_a_noisy_ratio_contains_the_ratio():
    ratios = 1.2 + 0.1 * np.random.default_rng(1).normal(size=(3, 20))
    ratio, low, high = report.interval(ratios)
    assert low < 1.2 < high and low < ratio < high and high - low < 0.1


def test_rows_are_written_as_json_lines(tmp_path):
    path = tmp_path / "rows.json"
    report.write_json(path, report.make_rows("m", 4, {"one": [[2.0]]}, {"one": 1.0}, "one"))
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["model"] == "m" and row["examples_per_second"] == 8


def test_pages_show_how_many_times_as_fast_the_reference_is():
    rates = {"ctl": [[2.0, 6.0, 8.0]], "jax": [[4.0, 8.0, 4.0]]}
    rows = report.make_rows("m", 4, rates, dict.fromkeys(rates, 1.0), "ctl")
    tables = report.result_tables(rows, "ctl", {"ctl": "ctl", "jax": "JAX", "torch": "PyTorch"})
    assert tables["speed"].rows == [["ctl", 24], ["JAX", 16]]
    assert tables["ratio"].rows == [["JAX", [0.75, 0.5, 2.0]]]
