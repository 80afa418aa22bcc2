"""The shares of a run's wall time, from events with times that the test sets."""

import json

import pytest

from ctl.loop import goodput


def event(name, time, step=0, **fields):
    return {"time": time, "event": name, "step": step, **fields}


def write(folder, events, metrics=()):
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))


STARTED = [
    event("start", 100.0),
    event("checkpoint", 110.0, 10, seconds={"total": 15.0, "steps": 8.0, "saving": 1.0}),
]


def test_time_after_the_checkpoint_of_a_killed_process_is_lost(tmp_path):
    write(tmp_path, STARTED, [{"time": 116.5, "split": "train", "step": 18}])
    assert goodput.find_lost(tmp_path, 10) == {"lost_steps": 8, "lost_seconds": 6.5}
    # The files of the checkpoint are damaged, and an older one is restored.
    assert goodput.find_lost(tmp_path, 0) == {"lost_steps": 18, "lost_seconds": 16.5}


@pytest.mark.parametrize("events", [[], [*STARTED, event("stop", 120.0, 18)]])
def test_a_new_run_and_one_that_stopped_have_lost_nothing(tmp_path, events):
    write(tmp_path, events)
    assert goodput.find_lost(tmp_path, 10) == {}
    assert goodput.find_lost(tmp_path / "new", 0) == {}


def test_shares_are_of_the_time_of_all_processes():
    events = [
        *STARTED,
        event("resume", 300.0, 10, lost_seconds=5.0),
        event("checkpoint", 310.0, 20, seconds={"total": 1.0}),
    ]
    current = {"total": 20.0, "steps": 12.0, "evaluation": 4.0}
    shares = goodput.measure_goodput(events, current)
    used = dict(steps=0.5, evaluation=0.1, saving=0.025, starting=0.0, compiling=0.0)
    assert shares == pytest.approx(dict(used, lost=0.125, other=0.25, seconds=40.0))


def test_finished_run_needs_no_current_process():
    stall = event("stall", 115.0, 12, seconds=300.0)  # which are of no activity
    events = [*STARTED, stall, event("end", 120.0, 18, seconds={"total": 20.0, "steps": 15.0})]
    assert goodput.measure_goodput(events)["steps"] == 0.75
    assert goodput.measure_goodput(events[:-1])["steps"] == pytest.approx(8 / 15)
    assert goodput.measure_goodput([]) == {}
