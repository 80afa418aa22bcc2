"""The search for the largest batch that fits."""

import pytest

from ctl.modes.aot_compile import batch_search


def search(peak_of, *, limit, start):
    """The largest batch, and the batches that the search compiled."""
    compiled = []

    def peak_bytes(rows):
        compiled.append(rows)
        return peak_of(rows) if peak_of(rows) <= limit else None

    known = {start: peak_of(start) if peak_of(start) <= limit else None}
    return batch_search.find_largest(peak_bytes, limit=limit, known=known), compiled


@pytest.mark.parametrize("start", [1, 64, 500, 4096])
@pytest.mark.parametrize("fixed", [0, 300_000])
def test_the_result_is_within_a_sixteenth_after_few_compilations(start, fixed):
    largest, compiled = search(lambda rows: fixed + 1000 * rows, limit=1_000_000, start=start)
    exact = (1_000_000 - fixed) // 1000
    assert exact * 15 / 16 - 1 <= largest <= exact
    assert len(compiled) <= 12
    assert len(set(compiled)) == len(compiled)


def test_memory_may_grow_in_steps():
    largest, _ = search(lambda rows: 2 ** (rows - 1).bit_length(), limit=1000, start=10)
    assert 480 <= largest <= 512


def test_the_result_is_zero_if_not_even_one_row_fits():
    largest, compiled = search(lambda rows: 2000, limit=1000, start=64)
    assert largest == 0
    assert compiled[-1] == 1
