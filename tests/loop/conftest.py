"""A clock that the test sets."""

import types

import pytest


@pytest.fixture
def clock(monkeypatch):
    """The time that `time.monotonic` returns: `clock.now`, which the test sets."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock
