"""A run of several processes that are killed for minutes keeps its memory, its files and its result."""

import pytest

from benchmarks import soak
from benchmarks.soak import Memory, growth_between_starts


def process(name, sizes):
    """A process with one sample every two seconds."""
    return Memory(name, 0, samples=[(2.0 * i, size) for i, size in enumerate(sizes)])


def test_samples_begin_after_the_first_new_checkpoint_has_settled():
    memory = Memory("worker 0", checkpoint=100)
    memory.add(1.0, 5, checkpoint=100)
    memory.add(2.0, 6, checkpoint=200)
    memory.add(11.9, 7, checkpoint=300)
    memory.add(12.0, 8, checkpoint=300)
    assert memory.samples == [(12.0, 8)]


def test_growth_from_start_to_start_is_that_of_each_task():
    memories = [process("worker 0", [size] * 3) for size in (100, 101, 102, 103, 104, 110)]
    memories.append(process("launcher", [50] * 3))
    assert growth_between_starts(memories) == {"worker 0": pytest.approx(107 / 100.5 - 1)}


def test_growth_of_the_last_fifth_of_many_samples_has_a_limit():
    grown = [process("evaluator", [100] * 4 + [500] * 12 + [103] * 4)]
    assert grown[0].growth() == pytest.approx(0.03)
    restarted = [process("worker 1", [100] * 20), process("worker 1", [103] * 20)]
    for memories in (grown, restarted):
        soak.check_memory(0.04, memories)
        with pytest.raises(SystemExit, match="grew by"):
            soak.check_memory(0.02, memories)
    few = process("launcher", [100] * 9)
    assert few.growth() is None
    soak.check_memory(0.02, [few])


def events(text):
    """The events of a text such as "start 0, checkpoint 100"."""
    pairs = (each.split() for each in text.split(", "))
    return [{"event": name, "step": int(step)} for name, step in pairs]


def test_run_that_resumed_from_its_last_checkpoint_is_complete():
    before = "start 0, checkpoint 100, eval 100, "
    after = "resume 100, checkpoint 200, checkpoint 210, stop 210, eval 210"
    assert soak.check_events(events(before + after)) == 1


@pytest.mark.parametrize(
    "missing",
    [
        "checkpoint 100, stop 100",
        "start 0, checkpoint 100",
        "start 0, checkpoint 300, stop 300",
        "start 0, checkpoint 300, resume 100, stop 100",
    ],
)
def test_events_that_miss_a_part_of_the_run_fail(missing):
    with pytest.raises(SystemExit, match="Error"):
        soak.check_events(events(missing))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_five_minutes_with_kills_keep_memory_files_events_and_every_bit(capsys):
    soak.main(["--minutes=5", "--kill_every=75"])
    output = capsys.readouterr().out
    assert "| largest difference of all weights, slots and counters | 0 |" in output
