"""What a process was doing when it was killed, derived from what it recorded."""

import json

import pytest

from benchmarks.workdir_state import ProcessEvents, read_events, read_metrics


def record(workdir, *events):
    workdir.mkdir(exist_ok=True)
    with open(workdir / "events.jsonl", "a") as file:
        for event, step in events:
            file.write(json.dumps({"event": event, "step": step}) + "\n")


@pytest.mark.parametrize(
    ("events", "file_of_checkpoint", "phase"),
    [
        ([], None, "start"),
        ([("resume", 150)], "ckpt-200_temp", "start"),
        ([("resume", 150), ("checkpoint", 200)], None, "step"),
        ([("resume", 150), ("checkpoint", 200)], "ckpt-200.index", "save"),
        ([("resume", 150), ("checkpoint", 300)], None, "eval"),
        ([("resume", 150), ("checkpoint", 300), ("eval", 300)], None, "step"),
    ],
)
def test_phase_follows_from_events_and_files(tmp_path, events, file_of_checkpoint, phase):
    record(tmp_path, ("start", 0), ("checkpoint", 150), ("eval", 150))  # an earlier process
    process = ProcessEvents(tmp_path, eval_interval=150)
    record(tmp_path, *events)
    if file_of_checkpoint:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / file_of_checkpoint).touch()
    assert process.phase() == phase
    assert process.made_progress() == (phase != "start")
    assert process.first_step == (events[0][1] if events else None)


def test_incomplete_event_is_not_read(tmp_path):
    record(tmp_path, ("start", 0))
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "checkpoint"')
    assert [event["event"] for event in read_events(tmp_path)] == ["start"]


def test_times_of_the_machine_are_not_among_the_metrics(tmp_path):
    names = ("time", "examples_per_second", "workers/waiting_seconds/worker 0", "loss")
    line = dict.fromkeys(names, 0.5)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert read_metrics(tmp_path) == [{"loss": 0.5}]
