"""Skips tests that need network namespaces where there are none."""

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable


@pytest.fixture(scope="session")
def namespaces():
    try:
        with Hosts(1):
            pass
    except Unavailable as error:
        pytest.skip(f"this machine cannot create network namespaces: {error}")
