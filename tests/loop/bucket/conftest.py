"""Fixtures of the tests of runs in object stores."""

import fsspec
import pytest

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
