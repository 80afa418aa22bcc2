"""Fixtures of the tests of runs in object stores."""

import time

import fsspec
import pytest

from ctl.loop.bucket import ownership, upload
from ctl.loop.bucket.store import open_folder


@pytest.fixture
def url(monkeypatch, tmp_path):
    """The URL of an empty folder in memory, with a cache folder of its own.

    The thread of a run whose upload failed may still write to the URL of its own test.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    return f"memory://bucket/{tmp_path.name}"


@pytest.fixture
def store(url):
    return open_folder(url)


@pytest.fixture
def quick(monkeypatch):
    """Lets a run wait for a store and for another run in steps of a hundredth of a second."""
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(ownership, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(upload, "_POLL_SECONDS", 0.01)
