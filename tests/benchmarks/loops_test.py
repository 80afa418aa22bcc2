import io
import json

import numpy as np
import pytest

from benchmarks import models, report, same, variants, worker

EMPTY = models.MODELS["empty"]


@pytest.mark.parametrize(
    "name",
    [
        f"{variants.CTL}off",
        variants.TUTORIAL,
        variants.LOOP,
        variants.BARE,
        "tf_keras fit",
        "tf_keras fit, best options",
    ],
)
def test_a_worker_answers_every_window_with_its_steps_and_seconds(name):
    answers = io.StringIO()
    with pytest.raises(worker.Done):
        variants.run(name, EMPTY, worker.Windows(io.StringIO("0\n0.05\n"), answers))
    first, second = (json.loads(line) for line in answers.getvalue().splitlines())
    assert first["steps"] in (1, EMPTY.steps_per_loop)
    assert second["steps"] > 10 and 0.05 <= second["seconds"] < 5
    assert second["peak_mib"] > 100


def test_ctl_and_the_hand_written_loop_end_with_the_same_weights():
    assert same.largest_difference(EMPTY) <= same.TOLERANCE


def test_a_row_has_the_medians_and_the_ratios_of_paired_windows():
    rates = {"mine": [[20.0, 44.0], [30.0, 66.0]], "reference": [[10.0, 22.0], [20.0, 44.0]]}
    mine, reference = report.rows(
        "m", 4, rates, {"mine": 90.0, "reference": 100.0}, reference="reference"
    )
    assert mine.examples_per_second == 4 * 37
    assert mine.microseconds_per_step == 1e6 / 37
    assert (mine.ratio_low, mine.ratio, mine.ratio_high) == (1.5, 1.75, 2.0)
    assert (mine.windows, mine.processes) == (4, 2)
    assert reference.ratio == reference.ratio_low == reference.ratio_high == 1
    assert "| mine | 148 | 27,027 | 1.750 (1.500 to 2.000) | 90 |" in report.table(
        [mine, reference], "reference"
    )


def test_the_interval_of_a_noisy_ratio_covers_it():
    ratios = 1.2 + 0.1 * np.random.default_rng(1).normal(size=(3, 20))
    ratio, low, high = report.interval(ratios)
    assert low < 1.2 < high and low < ratio < high and high - low < 0.1


def test_rows_are_written_as_json_lines(tmp_path):
    path = tmp_path / "rows.json"
    report.write_json(path, report.rows("m", 4, {"one": [[2.0]]}, {"one": 1.0}, "one"))
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["model"] == "m" and row["examples_per_second"] == 8
