"""The benchmark of compression measures bytes and seconds on a slow link between two hosts."""

import pytest

from benchmarks import compression


@pytest.mark.slow
@pytest.mark.long
def test_compressed_steps_send_fewer_bytes(namespaces, capsys):
    row = compression.main(["--width=64", "--batch=4", "--steps=1", "--rounds=1"])
    assert row["plain"]["mib"] > 1.8 * row["compressed"]["mib"] > 0
    assert len(row["ratios"]) == 1 and row["ratio"] > 0
    out = capsys.readouterr().out
    assert out.startswith("2 workers, 100 Mbit/s, ") and "times fewer)" in out
