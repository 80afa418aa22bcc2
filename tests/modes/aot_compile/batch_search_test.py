"""The search for the largest batch that fits."""

import pytest

from ctl.modes.aot_compile import batch_search


def search(peak, *, limit, start):
    """What is found, and how often it had to compile."""
    asked = []

    def fitting(rows):
        asked.append(rows)
        return peak(rows) if peak(rows) <= limit else None

    known = {start: peak(start) if peak(start) <= limit else None}
    return batch_search.largest(fitting, limit=limit, known=known), asked


@pytest.mark.parametrize("start", [1, 64, 500, 4096])
@pytest.mark.parametrize("fixed", [0, 300_000])
def test_it_comes_within_a_sixteenth_in_few_compilations(start, fixed):
    found, asked = search(lambda rows: fixed + 1000 * rows, limit=1_000_000, start=start)
    right = (1_000_000 - fixed) // 1000
    assert right * 15 / 16 - 1 <= found <= right
    assert len(asked) <= 12
    assert len(set(asked)) == len(asked)


def test_memory_that_grows_in_jumps_is_searched_too():
    found, _ = search(lambda rows: 2 ** (rows - 1).bit_length(), limit=1000, start=10)
    assert 480 <= found <= 512


def test_a_model_that_fits_with_no_batch_is_told_by_zero():
    found, asked = search(lambda rows: 2000, limit=1000, start=64)
    assert found == 0
    assert asked[-1] == 1
