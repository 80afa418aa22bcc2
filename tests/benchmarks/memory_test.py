"""The peaks that the memory benchmark measures."""

import pytest

from benchmarks import memory


@pytest.mark.slow
@pytest.mark.long
def test_accumulation_lowers_the_peak():
    settings = [memory.Setting("convolutions", count, batch=64, shrink=4) for count in (1, 8)]
    one, eight = memory.measure(settings, rounds=0)
    assert eight["peak_mib"] < 0.75 * one["peak_mib"]
