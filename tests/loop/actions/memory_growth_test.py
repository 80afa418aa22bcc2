"""Which growth of memory is reported."""

import pytest

from ctl.loop.actions.memory_growth import MemoryGrowth, read_resident_bytes

MIB = 2**20


def report(controller, samples, **options):
    """The lines printed for these measurements in MiB, one per loop of 10 steps."""
    values = iter(samples)
    action = MemoryGrowth(read_memory=lambda: int(next(values) * MIB), **options)
    action.controller = controller
    for loop in range(1, len(samples) + 10):
        controller.step = 10 * loop
        action({"loss": 0.0})
    return controller.reporter.lines


def test_growth_without_an_end_is_reported_with_its_rate(fake_controller):
    lines = report(fake_controller, [1000 + 10 * i for i in range(40)])
    assert len(lines) == 1
    # The tenth loop ends at step 100; 260 MiB are reached 26 loops later.
    assert "1,000 MiB at step 100, 1,260 MiB now, 1,000 MiB per 1,000 steps" in lines[0]
    (event,) = fake_controller.reporter.events
    assert event == {
        "event": "memory_growth", "step": 360, "before": 1000 * MIB, "after": 1260 * MIB,
    }  # fmt: skip


def test_it_is_reported_again_when_it_has_doubled(fake_controller):
    lines = report(fake_controller, [1000 + 10 * i for i in range(110)])
    assert [line.split("MiB at")[1].split(" MiB now")[0][-5:] for line in lines] == [
        "1,260", "1,520", "2,040",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "samples",
    [
        [1000] * 50,
        [1000 + 2 * i for i in range(100)],  # less than 256 MiB
        [5000 + 10 * i for i in range(100)],  # less than a quarter
        [1000] * 25 + [1600] * 25,  # one increase, as by the first evaluation
        [1000, 1600] * 25,  # up and down
        [0] * 50,  # not known
    ],
)
def test_other_changes_are_not_reported(fake_controller, samples):
    assert report(fake_controller, samples) == []


def test_long_run_keeps_few_measurements(fake_controller):
    action = MemoryGrowth(read_memory=lambda: 1)
    action.controller = fake_controller
    for _ in range(5000):
        action({})
    assert len(action._samples) <= 256


def test_resident_memory_of_this_process_is_read():
    before = read_resident_bytes()
    block = bytearray(64 * MIB)
    assert 32 * MIB < read_resident_bytes() - before < 128 * MIB and block
