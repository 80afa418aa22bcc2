"""python -m benchmarks.storage, with little data."""

import pytest

from benchmarks.storage import __main__ as storage


@pytest.mark.slow
@pytest.mark.long
def test_both_parts_print_their_numbers(capsys, monkeypatch):
    monkeypatch.setattr(storage, "SECONDS", 0.5)
    storage.main(["--mib=4", "--windows=1", "--records=3000"])
    out = capsys.readouterr().out
    for name in ("time of a step with / without an upload", "records per second, from step 0"):
        assert f"| {name}" in out
