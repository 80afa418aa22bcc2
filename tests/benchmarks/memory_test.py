"""The peaks that the memory benchmark measures."""

import pytest

from benchmarks import memory


def test_table_has_a_row_per_setting():
    row = {
        "model": "convolutions", "micro_batches": 4, "recompute": False, "xla": "off",
        "peak_mib": 1234.5, "peak_ratio": 2.5, "seconds": 1.0, "time_ratio": 1.01,
        "estimate_mib": 1001.2,
    }  # fmt: skip
    assert memory.table([row]).endswith(
        "\n| convolutions | 4 | no | off | 1,234 | 1,001 | 2.50 | 1.00 | 1.01 |"
    )


@pytest.mark.slow
@pytest.mark.long
def test_accumulation_lowers_the_peak():
    settings = [memory.Setting("convolutions", count, batch=64, shrink=4) for count in (1, 8)]
    one, eight = memory.measure(settings, steps=1, rounds=0)
    assert eight["peak_mib"] < 0.75 * one["peak_mib"]
