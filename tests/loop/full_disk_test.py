"""A full or read-only disk ends a run in one line; what was saved stays complete."""

import contextlib
import errno
import json
import os
import pathlib
import subprocess

import pytest
import tensorflow as tf

from ctl.errors import Failure
from ctl.loop import workdir
from tests.support import experiments

INTACT = "The last complete checkpoint, runs/experiment/checkpoints/ckpt-10, is intact."


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 2 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    folder.mkdir()
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"this machine cannot mount a small file system: {reason}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small(tmp_path):
    with small_disk(tmp_path / "small") as folder:
        yield folder


def fill(folder):
    """Fills the disk, except for the free part of the last page of each file."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def test_event_on_a_full_disk_is_complete_or_absent(small):
    folder = workdir.Workdir(small / "run")
    folder.create({})
    folder.event("start", 0)
    fill(small)
    with pytest.raises(Failure, match=r"events\.jsonl could not be written: No space left"):
        for step in range(200):  # until the page is full that the file has already
            folder.event("checkpoint", step, path="x" * 100)
    (small / "filler").unlink()
    folder.event("resume", 5)
    lines = [json.loads(line) for line in (small / "run/events.jsonl").read_text().splitlines()]
    assert 2 < len(lines) < 200
    assert lines[-1]["event"] == "resume"


def test_full_disk_ends_a_run_in_one_line_and_free_space_lets_it_resume(program, small):
    pathlib.Path("experiment.py").write_text(experiments.DROPOUT.replace("Dense(8)", "Dense(4000)"))
    options = [f"--workdir={small}/run", "--config.train.checkpoint_interval=5", "--mode=train"]
    code, out, err = program(*options, "--config.train.checkpoints_to_keep=20")
    assert (code, err) == (
        1,
        f"ctl: {small}/run/checkpoints/ckpt-30 could not be written: No space left on device. The "
        f"last complete checkpoint, {small}/run/checkpoints/ckpt-25, is intact. Free some space, then "
        "rerun the same command.\n",
    )
    assert "Done" not in out
    assert not (small / "run" / "run.lock").exists()
    (small / "run/checkpoints/ckpt-5.data-00000-of-00001").unlink()
    code, out, _ = program(*options, "--config.train.checkpoints_to_keep=20")
    assert code == 0 and f"Resumed from {small}/run/checkpoints/ckpt-25." in out
    assert json.loads((small / "run/result.json").read_text())["step"] == 30


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("checkpoint", marks=pytest.mark.slow),
        pytest.param("summaries", marks=pytest.mark.slow),
        "summary file",
        pytest.param("event", marks=pytest.mark.slow),
        "result",
    ],
)
def test_disk_that_fails_during_a_run_ends_it_in_one_line(program, monkeypatch, what):
    assert program("--config.train.steps=10")[0] == 0

    def denied(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    def full(*_, **__):
        raise tf.errors.ResourceExhaustedError(None, None, "x; No space left on device")

    target, error, name, reason = {
        "checkpoint": (
            "ctl.loop.checkpoints.checkpointer.Checkpointer.save", full,
            "runs/experiment/checkpoints/ckpt-20", "No space left on device",
        ),
        "summaries": (
            "orbit.utils.SummaryManager.flush", full, "The summaries", "No space left on device",
        ),
        "summary file": (
            "orbit.utils.SummaryManager.summary_writer", full,
            "The summaries", "No space left on device",
        ),
        "event": (
            "ctl.loop.json_files._append", denied,
            "runs/experiment/events.jsonl", "Read-only file system",
        ),
        "result": (
            "ctl.loop.json_files.os.replace", denied,
            "runs/experiment/result.json", "Read-only file system",
        ),
    }[what]  # fmt: skip
    if what == "result":
        replace = os.replace
        error = lambda a, b: denied() if "result" in str(b) else replace(a, b)  # noqa: E731
    with monkeypatch.context() as planted:
        planted.setattr(target, error)
        code, _, err = program()
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"ctl: {name} could not be written: {reason}. ")
    assert (INTACT if what != "result" else "ckpt-30, is intact") in err
    assert json.loads(pathlib.Path("runs/experiment/result.json").read_text())["step"] == 10


def test_unreadable_data_is_not_reported_as_an_unwritable_disk(program, monkeypatch):
    def unreadable(*_):
        raise tf.errors.PermissionDeniedError(None, None, "data; Permission denied")

    monkeypatch.setattr("ctl.StandardTrainer.train", unreadable)
    code, _, errors = program()
    assert code == 1 and "data; Permission denied" in errors and "workdir" not in errors
