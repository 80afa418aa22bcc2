"""A run that hangs says so, shows where, and goes on waiting."""

import json
import threading
import time

import pytest

from ctl import main
from ctl.loop import watchdog
from ctl.loop.watchdog import Watchdog
from tests import child

LIMIT = 0.2


class Run:
    """A watch over a run whose step the test moves, and what it said."""

    def __init__(self, tmp_path, seconds=LIMIT):
        self.step = 0
        self.reads = 0
        self.lines = []
        self.events = []
        self.stacks = open(tmp_path / "stacks", "w+")  # noqa: SIM115 - closed by the fixture
        self.watch = Watchdog(
            seconds,
            step_of=self._read,
            data_kind=lambda: "Arrays",
            on_event=lambda name, step, **fields: self.events.append((name, step, fields)),
            write=self.lines.append,
            stacks=self.stacks.fileno(),
        )

    def _read(self):
        self.reads += 1
        return self.step

    def short_loop(self):
        with self.watch.loop(self.step):
            self.step += 1

    def stalled(self):
        return [line for line in self.lines if line.startswith("No step has ended")]


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.stacks.close()


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_stall_is_said_once_with_the_stacks_and_its_end_is_said_too(run):
    run.step = 5
    with run.watch:
        run.short_loop()
        with run.watch.loop(6):
            wait_for(run.stalled)
            time.sleep(3 * LIMIT)
        run.stacks.seek(0)
        assert "most recent call first" in run.stacks.read()
    assert len(run.lines) == 2
    assert run.lines[0] == (
        "No step has ended for 0 s: after step 6 the run waits for the step itself, or the trainer's "
        'build_dataset("train") (Arrays). It goes on waiting; the stacks of all threads:'
    )
    assert run.lines[1] == "Going on, after 1 s at step 6."
    [(name, step, fields)] = run.events
    assert (name, step, set(fields)) == ("stall", 6, {"seconds", "waits_for"})
    assert fields["seconds"] >= LIMIT


def test_each_stall_is_said(run):
    with run.watch:
        run.short_loop()
        for count in (1, 2):
            with run.watch.loop(1):
                wait_for(lambda count=count: len(run.stalled()) == count)


def test_step_that_moves_in_a_long_loop_is_no_stall(run):
    with run.watch:
        run.short_loop()
        with run.watch.loop(run.step):
            end = time.monotonic() + 5 * LIMIT
            while time.monotonic() < end:
                run.step += 1
                time.sleep(0.01)
    assert run.reads > 0
    assert run.lines == []


def test_step_that_moves_again_in_the_same_loop_ends_the_stall(run):
    with run.watch:
        run.short_loop()
        with run.watch.loop(1):
            wait_for(run.stalled)
            run.step = 9
            wait_for(lambda: len(run.lines) == 2)
            assert run.lines[1].startswith("Going on, after")
            wait_for(lambda: len(run.stalled()) == 2)
            assert "after step 9" in run.stalled()[1]


def test_first_loop_may_take_ten_times_as_long(run):
    with run.watch:
        with run.watch.loop(0):
            time.sleep(4 * LIMIT)
            assert run.lines == []
            wait_for(run.stalled)
        with run.watch.loop(0):
            start = time.monotonic()
            wait_for(lambda: len(run.stalled()) == 2)
            assert time.monotonic() - start < 5 * LIMIT


def test_evaluation_and_saving_are_not_watched(run):
    with run.watch:
        for _ in range(2):  # the second has the limit of all that follow
            run.short_loop()
        time.sleep(4 * LIMIT)
        assert (run.lines, run.reads) == ([], 0)


def test_nothing_is_read_while_loops_end_in_time(run):
    with run.watch:
        for _ in range(10):
            with run.watch.loop(run.step):
                time.sleep(LIMIT / 4)
    assert run.reads == 0


def test_step_that_the_device_does_not_tell_has_not_moved(run, monkeypatch):
    monkeypatch.setattr(watchdog, "_LONGEST_READ", 0.05)
    told = threading.Event()
    run.watch._step_of = lambda: told.wait(20)
    with run.watch:
        run.short_loop()
        with run.watch.loop(1):
            wait_for(run.stalled)
            time.sleep(2 * LIMIT)  # time for more looks, which must not read each in a thread more
            reading = [t for t in threading.enumerate() if t.name == "ctl-watchdog-step"]
            assert len(reading) == 1
            told.set()


def test_step_that_cannot_be_read_has_not_moved(run):
    run.watch._step_of = lambda: 1 / 0
    with run.watch:
        run.short_loop()
        with run.watch.loop(1):
            wait_for(run.stalled)


def test_record_that_cannot_be_written_ends_no_watch(run):
    def full(*_, **__):
        raise OSError("No space left on device")

    run.watch._on_event = full
    with run.watch:
        run.short_loop()
        for count in (1, 2):
            with run.watch.loop(1):
                wait_for(lambda count=count: len(run.stalled()) == count)


def test_loop_that_fails_does_not_go_on(run):
    with run.watch:
        run.short_loop()
        with pytest.raises(KeyError), run.watch.loop(1):
            wait_for(run.stalled)
            raise KeyError
    assert len(run.lines) == 1


def watching():
    return any(thread.name == "ctl-watchdog" for thread in threading.enumerate())


def test_thread_ends_with_the_run(run):
    with run.watch:
        assert watching()
    wait_for(lambda: not watching())


def test_zero_seconds_switch_it_off(tmp_path):
    off = Run(tmp_path, seconds=0.0)
    with off.watch:
        off.short_loop()
        with off.watch.loop(1):
            assert not watching()
    off.stacks.close()


EXPERIMENT = """
import time
import numpy as np
import tensorflow as tf
import tf_keras
import ctl


class Trainer(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(3)])

    def build_dataset(self, split, input_context):
        def slow_examples():
            for i in range(400 if split == "train" else 20):
                if i == 300:
                    time.sleep({sleep})
                yield {{"x": np.full(4, i % 7, np.float32), "label": np.int32(i % 3)}}

        spec = {{"x": tf.TensorSpec([4]), "label": tf.TensorSpec([], tf.int32)}}
        return tf.data.Dataset.from_generator(slow_examples, output_signature=spec)

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)


def get_config():
    return ctl.config(
        trainer="slow.py:Trainer",
        data=dict(global_batch_size=7, prefetch=1),
        train=dict(steps=50, steps_per_loop=5, stall_seconds={limit}),
    )
"""


def test_generator_that_hangs_is_named_and_seen_in_the_stacks(tmp_path):
    (tmp_path / "slow.py").write_text(EXPERIMENT.format(sleep=3.0, limit=0.5))
    done = child.run(["-m", "ctl.main", "--config=slow.py", "--workdir=run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("No step", "Going on"))]
    assert len(said) == 2
    assert 'waits for the trainer\'s build_dataset("train") (_FlatMapDataset). It' in said[0]
    assert said[1].startswith("Going on, after ")
    assert 'slow.py", line' in done.stderr and "in slow_examples" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("stall") == 1
    assert lines[-1]["event"] == "end"


def test_run_without_a_stall_says_nothing_of_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(EXPERIMENT.format(sleep=0.0, limit=300.0))
    assert main.run(["ctl", "--config=slow.py", "--workdir=run"]) == 0
    out, err = capfd.readouterr()
    assert "No step" not in out and err == ""
    wait_for(lambda: not watching())
