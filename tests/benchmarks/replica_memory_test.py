"""The memory of each worker is measured by the size of the packs of gradients."""

import pytest

from benchmarks import replica_memory


@pytest.mark.slow
@pytest.mark.long
def test_one_message_needs_more_memory_than_packs_of_it():
    flags = ["--modes", "False", "--packs", "none", "4", "--width=1024", "--depth=8"]
    one, packed = replica_memory.main(flags)
    assert [one[:3], packed[:3]] == [[4, "`False`", "all at once"], [4, "`False`", "4 MiB"]]
    # The gradients are 32 MiB, of which one message needs two or three copies.
    assert one[4] - packed[4] > 32 and one[5] - packed[5] > 64
