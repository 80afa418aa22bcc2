"""The benchmarks of packs measure each size, and the memory of each worker."""

import pytest

from benchmarks import packs, replica_memory


@pytest.mark.slow
@pytest.mark.long
def test_each_size_is_measured_at_each_rate_and_compressed_steps_send_fewer_bytes(namespaces):
    flags = ["--workers=2", "--rates", "100", "none", "--sizes", "0.1", "none"]
    flags += ["--compression=float16"]
    rows = packs.main([*flags, "--windows=1", "--steps=1", "--layers=6", "--width=128"])
    assert [row[:3] for row in rows] == [[2, 0, "0.1 Gbit/s"], [2, 0, "no limit"]]
    assert all(seconds[0] > 0 for row in rows for seconds in row[3:6])
    for *_, packed, at_once, compressed in rows:
        assert packed > 1.7 * compressed > 0 and at_once > 1.7 * compressed


@pytest.mark.slow
@pytest.mark.long
def test_one_message_needs_more_memory_than_packs_of_it():
    flags = ["--modes", "False", "--packs", "none", "4", "--width=1024", "--depth=8"]
    one, packed = replica_memory.main(flags)
    assert [one[:3], packed[:3]] == [[4, "`False`", "all at once"], [4, "`False`", "4 MiB"]]
    # The gradients are 32 MiB, of which one message needs two or three copies.
    assert one[4] - packed[4] > 32 and one[5] - packed[5] > 64
