"""Which checkpoints are kept as the best ones."""

import contextlib
import errno
import functools
import pathlib

import pytest
import tensorflow as tf

import ctl
from ctl.errors import Failure
from ctl.loop.actions.best_checkpoint import BestCheckpoint, find_best
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.loop.shared import OtherProcesses, make_reference

NAN = float("nan")


@functools.cache
def make_trainer():
    return make_reference()


@pytest.fixture
def evaluate(fake_controller, tmp_path):
    """Calls an action, made anew as by a resumed run, with the value of a step."""
    fake_controller.trainer = make_trainer()
    fake_controller.evaluator = ctl.StandardEvaluator(fake_controller.trainer)

    def call(step, value, *, mode="max", metric="eval/loss", **options):
        action = BestCheckpoint(metric, mode, folder=tmp_path / "best", **options)
        action.begin(fake_controller)
        fake_controller.step = step
        fake_controller.trainer.global_step.assign(step)
        action({"loss": value, "accuracy": value})
        return action

    return call


def kept(tmp_path):
    return CheckpointFiles(tmp_path / "best").steps()


def saved(controller):
    return [event["step"] for event in controller.reporter.events if event["event"] == "best"]


@pytest.mark.parametrize(
    ("mode", "keep", "values", "steps", "best"),
    [
        ("min", 1, [0.3, 0.1, 0.2], [2], 2),
        ("max", 2, [0.5, 0.5, 0.5], [1, 2], 1),  # of equal values the first
        ("min", 2, [0.3, 0.1, 0.2, 0.4], [2, 3], 2),
        ("max", 2, [NAN, 0.1, NAN, 0.2, 0.3], [4, 5], 5),
    ],
)
def test_best_ones_are_kept_in_any_order(evaluate, tmp_path, mode, keep, values, steps, best):
    for step, value in enumerate(values, 1):
        action = evaluate(step, value, mode=mode, keep=keep)
    assert kept(tmp_path) == steps
    assert find_best(tmp_path / "best").endswith(f"ckpt-{best}")
    result = action.result()["best"]
    assert (result["step"], result["value"]) == (best, values[best - 1])
    # TensorFlow's own tools find the best one as the latest.
    assert tf.train.latest_checkpoint(str(tmp_path / "best")).endswith(f"ckpt-{best}")


def test_resumed_run_neither_repeats_a_best_checkpoint_nor_forgets_it(
    evaluate, tmp_path, fake_controller
):
    evaluate(1, 0.5)
    evaluate(3, 0.75)
    for step, value in ((1, 0.5), (2, 0.625), (3, 0.75), (4, 0.7)):  # resumed at step 1
        evaluate(step, value)
    assert saved(fake_controller) == [1, 3] and kept(tmp_path) == [3]
    evaluate(3, 0.75, keep=3)  # not again, although there is room
    assert saved(fake_controller) == [1, 3]


def test_best_checkpoint_that_cannot_be_read_is_reported_in_one_line(evaluate, tmp_path):
    action = evaluate(1, 0.5, restore_at_end=True)
    data = tmp_path / "best/ckpt-1.data-00000-of-00001"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(Failure, match=r"best/ckpt-1 .*delete"):
        action.end()


@pytest.mark.parametrize("name", ["read_bytes", "stat"])
def test_best_checkpoint_that_cannot_be_read_at_present_is_not_replaced(
    evaluate, tmp_path, monkeypatch, name
):
    evaluate(1, 0.9, keep=2)
    evaluate(2, 0.5, keep=2)
    original, calls = getattr(pathlib.Path, name), []

    def fail(path, *arguments, **options):
        if "best/ckpt-1." in str(path):
            calls.append(path)
            if len(calls) == number:
                raise OSError(errno.ESTALE, "Stale file handle")
        return original(path, *arguments, **options)

    with monkeypatch.context() as planted:
        planted.setattr(pathlib.Path, name, fail)
        for number in range(1, 9):
            calls.clear()
            with contextlib.suppress(OSError, Failure):
                evaluate(3 + number, 0.6 + number / 100, keep=2)
    assert 1 in kept(tmp_path) and find_best(tmp_path / "best").endswith("ckpt-1")


def test_damaged_best_checkpoint_is_named_and_kept(evaluate, tmp_path, fake_controller, capsys):
    evaluate(1, 0.9)
    (tmp_path / "best/ckpt-1.whole").write_bytes(b"\xff")
    fake_controller.reporter.lines = []
    fake_controller.reporter.print_line = fake_controller.reporter.lines.append
    evaluate(2, 0.5)
    evaluate(3, 0.6)
    line = f"Skipped {tmp_path}/best/ckpt-1: its marker cannot be read."
    assert fake_controller.reporter.lines == [line] * 2
    assert (tmp_path / "best/ckpt-1.index").exists() and kept(tmp_path) == [3]
    assert find_best(tmp_path / "best").endswith("ckpt-3")
    assert capsys.readouterr().out == line + "\n"


def test_best_one_is_that_of_the_newest_metric_and_mode(evaluate, tmp_path):
    assert evaluate(1, NAN).result() == {}
    with pytest.raises(ctl.UsageError, match="has no checkpoint: set train"):
        find_best(tmp_path / "best")
    evaluate(1, 0.9, mode="min", keep=3)
    for step, value in ((2, 0.5), (3, 0.75)):
        evaluate(step, value, mode="max", keep=3)
    assert kept(tmp_path) == [1, 2, 3]
    assert find_best(tmp_path / "best").endswith("ckpt-3")
    action = evaluate(4, 0.25, mode="min")
    assert kept(tmp_path) == [4] and action.result()["best"]["value"] == 0.25


def test_the_chief_decides_for_all_processes(evaluate, tmp_path, fake_controller):
    processes = OtherProcesses(of_chief=1)
    fake_controller.is_chief, fake_controller.processes = False, processes
    evaluate(1, NAN)
    sent = [value for name, value in processes.calls if name == "broadcast_from_chief"]
    # Saved on the chief's word, into a temporary folder.
    assert sent == [0] and saved(fake_controller) == [1] and kept(tmp_path) == []
