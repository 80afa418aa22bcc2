"""The table of slices, and names that are not in it."""

import pytest

import ctl
from ctl.modes.aot_compile import slices


@pytest.mark.parametrize(
    ("name", "cores", "hosts", "gib"),
    [
        ("v2:2x2", 8, 1, 7.48),
        ("v3:4x4", 32, 4, 15.48),
        ("v4:2x2x1", 8, 1, 15.25),
        ("v5e:1x1", 1, 1, 15.75),
        ("v5e:2x4", 8, 1, 15.75),
        ("v5p:4x4x4", 64, 16, 95.74),
        ("v6e:2x2", 4, 1, 31.25),
        ("v7x:2x2x1", 8, 1, 94.75),
    ],
)
def test_a_slice_is_found_by_its_name(name, cores, hosts, gib):
    slice_ = slices.find_slice(name)
    assert (slice_.name, slice_.cores, slice_.hosts) == (name, cores, hosts)
    assert slice_.hbm_bytes / slices.GIB == pytest.approx(gib)


def test_a_generation_has_other_names_and_a_list_keeps_its_order():
    assert slices.find_slice("v5litepod:2x2") == slices.find_slice("V5E:2x2")
    assert slices.find_slice("tpu7x:2x2x1").compiler_name == "tpu7x:2x2x1"
    topology = slices.parse_topology("v6e:2x4, v5e:2x2")
    assert [slice_.name for slice_ in topology] == ["v6e:2x4", "v5e:2x2"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("v5e:", "no v5e slice of no chips"),
        ("v5e", "write GENERATION:CHIPS"),
        ("v9:2x2", "the generations are v2, v3, v4, v5e, v5p, v6e, v7x"),
        ("v5e:2x2,v5e:2x2", "twice"),
    ],
)
def test_a_slice_that_nobody_can_rent_is_rejected(names, message):
    with pytest.raises(ctl.UsageError, match=message):
        slices.parse_topology(names)


def test_slices_are_unique_and_consist_of_complete_machines():
    table = [
        slices.find_slice(f"{generation.name}:{shape}")
        for generation in slices.GENERATIONS.values()
        for shape in generation.shapes
    ]
    assert len({s.name for s in table}) == len(table) > 50
    assert all(s.hosts >= 1 and s.cores % s.hosts == 0 for s in table)
