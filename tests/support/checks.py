"""Assertions of many tests: equal values, and errors of one line."""

import contextlib

import numpy as np
import pytest

from ctl.errors import UsageError


def close(values, expected, tolerance=0.0):
    """Asserts that as many values are equal, within an absolute tolerance."""
    for one, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@contextlib.contextmanager
def one_line(message):
    """Expects a UsageError of one line that contains a pattern."""
    with pytest.raises(UsageError, match=message) as error:
        yield
    assert "\n" not in str(error.value)
