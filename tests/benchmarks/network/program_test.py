"""The benchmark measures real workers, with a small model at one rate."""

import json

import pytest

from benchmarks.network import __main__ as program
from benchmarks.network.cost_model import Measurement, sent_bytes


@pytest.mark.slow
@pytest.mark.long
def test_two_workers_are_measured_at_two_rates(namespaces, tmp_path, capsys):
    out = tmp_path / "network.jsonl"
    arguments = ["--models", "small", "--workers", "2", "--rates", "10", "200", "--windows", "1"]
    measured = program.main([*arguments, "--out", str(out)])
    assert [m.mbits for m in measured] == [10, 200]
    for m in measured:
        # Headers and acknowledgments add 5 to 10 %, and requests more to small transfers.
        assert 1 < m.sent / sent_bytes(2, m.gradient_bytes) < 1.2
        assert m.computing > 0
    # The link limits the first: 127,000 bytes at 10 Mbit/s. Other programs may slow it down.
    ideal = sent_bytes(2, measured[0].gradient_bytes) * 8 / 10e6
    assert 1 < measured[0].reducing / ideal < 5
    assert measured[1].reducing < measured[0].reducing
    assert [Measurement(**json.loads(line)) for line in out.read_text().splitlines()] == measured
    printed = capsys.readouterr().out
    assert program.main(["--read", str(out)]) == measured
    assert capsys.readouterr().out in printed  # the same table
