"""Searches for the largest batch that fits into memory."""

from collections.abc import Callable, Mapping

_MAX_ROWS = 2**20  # per core; a larger result would be an error of the search
_PRECISION = 16  # the result is exact to one part in this number


def find_largest(
    peak_bytes: Callable[[int], int | None], *, limit: int, known: Mapping[int, int | None]
) -> int:
    """Finds the largest number of rows per core that fits, to within a sixteenth.

    Memory grows about linearly with the rows, so the two largest batches that fit predict the
    limit. A batch that does not fit only bounds the search from above: the memory that the compiler
    reports for it is not reliable. The result is always a batch that was compiled.

    Args:
        peak_bytes: rows -> peak memory in bytes, or None if they do not fit.
        limit: the available memory in bytes.
        known: results of `peak_bytes` for at least one number of rows.

    Returns:
        The rows per core; 0 if not even one row fits.
    """
    peaks = dict(known)
    while True:
        low = max((rows for rows, peak in peaks.items() if peak is not None), default=0)
        high = min((rows for rows, peak in peaks.items() if peak is None), default=_MAX_ROWS)
        if high - low <= max(1, low // _PRECISION):
            return low
        rows = _choose_rows(peaks, low, high, limit)
        peaks[rows] = peak_bytes(rows)


def _choose_rows(peaks: Mapping[int, int | None], low: int, high: int, limit: int) -> int:
    """Chooses the rows to try next, between `low`, which fits, and `high`, which does not."""
    fitting = sorted((rows, peak) for rows, peak in peaks.items() if peak is not None)
    if not fitting:
        return max(1, high // 4)
    if len(fitting) == 1:
        guess = low * 2 if high == _MAX_ROWS else (low + high) // 2
    else:
        (rows, peak), (more_rows, larger_peak) = fitting[-2:]
        slope = max(1.0, (larger_peak - peak) / (more_rows - rows))
        guess = int(more_rows + 0.97 * (limit - larger_peak) / slope)
        if high != _MAX_ROWS:
            margin = (high - low) // 8
            guess = min(max(guess, low + margin), high - margin)
            if len(peaks) % 2:  # bisect every other time, in case memory is far from linear
                guess = (low + high) // 2
    step = max(1, low // _PRECISION)  # a guess closer to a known batch would not narrow the range
    return min(max(guess, low + step), high - 1)
