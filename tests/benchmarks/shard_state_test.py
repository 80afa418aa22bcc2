"""The benchmark of shard_state measures slots and time, and compares the weights."""

import pytest

from benchmarks import shard_state


@pytest.mark.slow
@pytest.mark.long
def test_slots_are_split_and_weights_have_the_same_bits(capsys):
    row = shard_state.main(["--width=64", "--batch=8", "--steps=1", "--rounds=1"])
    assert row["same_bits"] and 0.25 <= row["share"] <= 0.2525
    assert len(row["ratios"]) == 1 and row["ratio"] > 0
    assert capsys.readouterr().out.startswith(
        "Adam, 4 replicas: slots 0.03 of 0.13 MiB per replica"
    )
