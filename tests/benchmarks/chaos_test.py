"""A run that is killed again and again ends with the bits of one that is not, no example lost."""

import json

import numpy as np
import pytest

from benchmarks import chaos, counting
from tests import child

STEPS = 200  # 1400 examples: an epoch and 397


def consumed():
    counts = np.zeros([3, counting.EXAMPLES], np.int32)
    counts[0] = 1
    counts[1, :397] = 1
    return counts


def test_an_epoch_is_whole_if_every_example_was_consumed_once():
    assert counting.check_consumed(consumed().ravel(), STEPS) == (1, 397)


@pytest.mark.parametrize(
    ("where", "count", "told"),
    [
        ((0, 17), 0, "Example 17 was consumed 0 times in epoch 0"),
        ((0, 17), 2, "Example 17 was consumed 2 times in epoch 0"),
        ((1, 17), 2, "The last epoch has 398 examples, want 397 once each"),
        ((1, 17), 0, "The last epoch has 396 examples"),
        ((2, 17), 1, "The last epoch has 398 examples"),
    ],
)
def test_an_example_that_is_lost_repeated_or_early_is_told(where, count, told):
    counts = consumed()
    counts[where] = count
    with pytest.raises(ValueError, match=told):
        counting.check_consumed(counts.ravel(), STEPS)


def test_as_many_examples_that_are_not_once_each_are_told():
    counts = consumed()
    counts[1, 0], counts[1, 1] = 2, 0
    with pytest.raises(ValueError, match="want 397 once each"):
        counting.check_consumed(counts.ravel(), STEPS)


def record(workdir, *events):
    workdir.mkdir(exist_ok=True)
    with open(workdir / "events.jsonl", "a") as file:
        for event, step in events:
            file.write(json.dumps({"event": event, "step": step}) + "\n")


@pytest.mark.parametrize(
    ("events", "left", "phase"),
    [
        ([], None, "start"),
        ([("resume", 150)], "ckpt-200_temp", "start"),
        ([("resume", 150), ("checkpoint", 200)], None, "step"),
        ([("resume", 150), ("checkpoint", 200)], "ckpt-200.index", "save"),
        ([("resume", 150), ("checkpoint", 300)], None, "eval"),
        ([("resume", 150), ("checkpoint", 300), ("eval", 300)], None, "step"),
    ],
)
def test_what_a_kill_hit_is_told_by_what_it_left(tmp_path, events, left, phase):
    record(tmp_path, ("start", 0), ("checkpoint", 150), ("eval", 150))  # an earlier life
    look = chaos.Look(tmp_path)
    record(tmp_path, *events)
    if left:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / left).touch()
    assert look.phase() == phase
    assert look.moved() == (phase != "start")
    assert look.origin == (events[0][1] if events else None)


def test_half_an_event_is_none(tmp_path):
    record(tmp_path, ("start", 0))
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "checkpoint"')
    assert [event["event"] for event in chaos.events(tmp_path)] == ["start"]


@pytest.mark.parametrize(
    ("code", "out", "phase", "told"),
    [
        (0, "Done", "step", "exit code 0"),
        (-15, "training", "step", "exit code -15"),
        (75, "Lost a worker", "step", "stopped in step without a checkpoint"),
        (75, "Stopped at step 60", "step", "stopped at 60, saved 0"),
    ],
)
def test_a_sigterm_that_ends_otherwise_than_promised_is_told(tmp_path, code, out, phase, told):
    (tmp_path / "result.json").write_text('{"step": 60}')
    with pytest.raises(SystemExit, match=told):
        chaos.check_stop(code, out, tmp_path, phase)


def test_a_sigterm_may_come_before_there_is_anything_to_save(tmp_path):
    chaos.check_stop(-15, "", tmp_path, "start")
    chaos.check_stop(75, "Stopped before training began", tmp_path, "start")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        ["--kills=2", "--steps=2500"],
        pytest.param(["--kills=1", "--workers=2", "--steps=1000"], marks=pytest.mark.long),
        pytest.param(
            ["--kills=2", "--signal=SIGTERM", "--strategy=mirrored", "--steps=2500"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_kills_change_no_bit_and_lose_no_example(options, capsys):
    chaos.main(options)
    out = capsys.readouterr().out
    steps = int(options[-1].partition("=")[2])
    epochs, begun = divmod(steps * counting.BATCH, counting.EXAMPLES)
    assert "| largest difference of all weights, slots and counters | 0 |" in out
    assert f"| epochs x examples, each consumed once | {epochs} x 1003 and {begun} |" in out


# The updates are made of other examples than the position says: of each batch the first one twice.
REPEATING = """
import sys

import tensorflow as tf

sys.path.insert(0, "ROOT")
from benchmarks import counting
from benchmarks.counting import get_config as whole


class Repeating(counting.CountingTrainer):
    def preprocess(self, batch):
        index = batch["index"]
        return {**batch, "index": tf.concat([index[:1], index[:1], index[2:]], axis=0)}


def get_config():
    config = whole()
    config.trainer = "repeating.py:Repeating"
    config.train.steps = 20
    return config
"""


@pytest.mark.slow
def test_a_trainer_that_repeats_an_example_is_found_out(tmp_path):
    program = REPEATING.replace("ROOT", str(child.ROOT))
    (tmp_path / "repeating.py").write_text(program)
    done = child.run(["-m", "ctl.main", "--config=repeating.py", "--workdir=run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = chaos.weights(tmp_path / "run")
    (counts,) = [value for name, value in found.items() if name.startswith("consumed/")]
    assert counts.sum() == 20 * counting.BATCH
    with pytest.raises(ValueError, match="want 140 once each"):
        counting.check_consumed(counts, 20)
