"""Which steps are profiled, and the costliest operations of a profile."""

import os
import signal
import threading

import tensorflow as tf

import ctl
from ctl.loop.profiler import Profiler, find_newest, list_operations
from tests.loop.shared import control, make_reference, share


@share
def make_trainer():
    return make_reference()


def run(folder, steps, *, request_at=None):
    """Trains 20 steps in loops of 8; returns the lines, the events and the ends of the loops."""
    trainer, ends = make_trainer(), []

    def after_loop(outputs):
        ends.append(int(trainer.global_step.numpy()))
        if ends[-1] == request_at:
            os.kill(os.getpid(), signal.SIGUSR1)

    profiler = Profiler(steps, folder=folder and str(folder))
    actions = [profiler, ctl.as_action(after_loop, at="train")]
    controller = control(trainer, steps_per_loop=8, actions=actions)
    reporter = controller.reporter
    with controller.actions.around_training():
        controller.train(20)
    lines = [line for line in reporter.lines if not line.startswith("train ")]
    return lines, reporter.events, ends


def test_profile_of_exact_steps_and_its_costliest_operations(tmp_path):
    lines, events, ends = run(tmp_path, "10:18")
    assert ends == [8, 10, 16, 18, 20]
    ((name, step, fields),) = events
    assert (name, step, fields["first"]) == ("profile", 18, 10)
    assert fields["path"] == str(find_newest(tmp_path))
    assert lines[0].startswith("Profile of the steps 10 to 18: ") and len(lines) == 11
    operations = list_operations(find_newest(tmp_path))
    assert fields["operations"] == operations[:10]
    assert operations == sorted(operations, key=lambda each: -each[1])
    names = " ".join(name for name, _ in operations)
    assert "MatMul" in names and "while/body" not in names
    assert operations[0][0] in lines[1] and "ms per step" in lines[1]


def test_profiler_leaves_the_signal_as_it_is_in_a_thread():
    before, seen = signal.getsignal(signal.SIGUSR1), []

    def train():
        with Profiler().around_training():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]


def test_signal_profiles_the_next_inner_loop(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    _, events, ends = run(tmp_path, "", request_at=8)
    assert ends == [8, 16, 20]
    assert [(step, fields["first"]) for _, step, fields in events] == [(16, 8)]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_missing_profile_is_reported_and_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda folder: None)
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: None)
    lines, events, ends = run(tmp_path, "0:8")
    assert lines == ["TensorFlow has written no profile of the steps 0 to 8."]
    assert events == [] and ends == [8, 16, 20]


def test_process_that_is_not_the_chief_has_the_same_loops_and_writes_nothing(tmp_path):
    _, _, ends = run(None, "10:18")
    assert ends == [8, 10, 16, 18, 20]
    assert not list(tmp_path.iterdir())


def test_profile_of_another_profiler_is_left_alone(tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        lines, events, ends = run(tmp_path, "0:8")
    finally:
        tf.profiler.experimental.stop()
    assert ends == [8, 16, 20] and events == []
    assert lines == ["The steps are not profiled, since another profile is being recorded."]
    assert find_newest(tmp_path / "other")
