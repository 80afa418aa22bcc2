"""The benchmark of groups of gradients."""

import pytest

from benchmarks import overlap


def test_report_has_medians_per_round_and_of_all_windows():
    seconds = [(0.5, 1.0, 0.5), (0.5, 1.2, 0.8), (0.6, 1.1, 1.0)], [(1.0, 2.0, 1.0)] * 2
    lines = overlap.report([[overlap.Window(*each) for each in windows] for windows in seconds])
    # The gradients of 12 matrices of 513 x 512 and one of 513 x 10, of 4 bytes.
    assert overlap.rate(1.0) == pytest.approx(4 * 8 * (12 * 513 * 512 + 5130) / 1e6)
    assert lines[2:] == [
        "| 1 | 0.50 | 202 | 1.10 | 0.80 | 1.50 (1.30 to 1.75) |",
        "| 2 | 1.00 | 101 | 2.00 | 1.00 | 2.00 (2.00 to 2.00) |",
        "| all | 0.60 | 168 | 1.20 | 1.00 | 2.00 (1.50 to 2.00) |",
    ]


@pytest.mark.slow
@pytest.mark.long
def test_workers_with_groups_have_the_bits_of_those_with_one_group(namespaces):
    windows = overlap.run_round(1.0, windows=2, steps=2)
    assert len(windows) == 2
