"""Searches for the largest batch that fits into memory. Loads no TensorFlow."""

from collections.abc import Callable, Mapping

_MOST = 2**20  # rows of a core: more is a mistake of the search, not a batch
_FINE = 16  # the answer is right to within one part of so many


def largest(
    peak: Callable[[int], int | None], *, limit: int, known: Mapping[int, int | None]
) -> int:
    """The most rows of a core that fit, to within a sixteenth.

    Memory grows about linearly with the rows, so two that fit tell about where the limit is; what
    the compiler says of those that do not fit is of no such use. Every answer was compiled.

    Args:
        peak: rows -> bytes at the most, or None where they do not fit.
        limit: bytes that there are.
        known: what `peak` is known to give, for at least one number of rows.

    Returns:
        The rows; 0 where not even one fits.
    """
    found = dict(known)
    while True:
        low = max((rows for rows, size in found.items() if size is not None), default=0)
        high = min((rows for rows, size in found.items() if size is None), default=_MOST)
        if high - low <= max(1, low // _FINE):
            return low
        rows = _next(found, low, high, limit)
        found[rows] = peak(rows)


def _next(found: Mapping[int, int | None], low: int, high: int, limit: int) -> int:
    """Rows to try, between those that fit and those that do not."""
    fits = sorted((rows, size) for rows, size in found.items() if size is not None)
    if not fits:
        return max(1, high // 4)
    if len(fits) == 1:
        guess = low * 2 if high == _MOST else (low + high) // 2
    else:
        (rows, size), (more, larger) = fits[-2:]
        slope = max(1.0, (larger - size) / (more - rows))
        guess = int(more + 0.97 * (limit - larger) / slope)
        if high != _MOST:
            margin = (high - low) // 8
            guess = min(max(guess, low + margin), high - margin)
            if len(found) % 2:  # a line that misleads must not make the search a long one
                guess = (low + high) // 2
    step = max(1, low // _FINE)  # a guess beside what is known would learn nothing
    return min(max(guess, low + step), high - 1)
