"""The benchmark of compression measures bytes and seconds on a slow link between two hosts."""

import pytest

from benchmarks import compression
from benchmarks.network.namespaces import Unavailable


@pytest.mark.slow
@pytest.mark.long
def test_compressed_steps_send_fewer_bytes(capsys):
    try:
        row = compression.main(["--width=64", "--batch=4", "--steps=1", "--rounds=1"])
    except Unavailable as error:
        pytest.skip(f"this machine cannot create network namespaces: {error}")
    assert row["plain"]["mib"] > 5 * row["compressed"]["mib"] > 0
    assert len(row["ratios"]) == 1 and row["ratio"] > 0
    out = capsys.readouterr().out
    assert out.startswith("2 workers, 100 Mbit/s, ") and "times fewer)" in out
