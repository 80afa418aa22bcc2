"""A full or read-only disk ends a run in one line; what was saved stays complete."""

import errno
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import tensorflow as tf

from ctl import main
from tests.support import experiments

INTACT = "The last complete checkpoint, runs/experiment/checkpoints/ckpt-10, is intact."


@pytest.fixture
def small(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    folder.mkdir()
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"this machine cannot mount a small file system: {reason}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk_ends_a_run_in_one_line_and_free_space_lets_it_resume(program, small):
    pathlib.Path("experiment.py").write_text(experiments.DROPOUT.replace("Dense(8)", "Dense(4000)"))
    options = [f"--workdir={small}/run", "--config.train.checkpoint_interval=5", "--mode=train"]
    code, out, err = program(*options, "--config.train.checkpoints_to_keep=20")
    assert err == (
        f"ctl: {small}/run/checkpoints/ckpt-30 could not be written: No space left on device. The "
        f"last complete checkpoint, {small}/run/checkpoints/ckpt-25, is intact. Free some space, then "
        "rerun the same command.\n"
    )
    assert code == 1 and "Done" not in out
    assert not (small / "run" / "run.lock").exists()
    (small / "run/checkpoints/ckpt-5.data-00000-of-00001").unlink()
    code, out, _ = program(*options, "--config.train.checkpoints_to_keep=20")
    assert code == 0 and f"Resumed from {small}/run/checkpoints/ckpt-25." in out
    assert json.loads((small / "run/result.json").read_text())["step"] == 30


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The folder of a run of 10 steps; not to be changed."""
    folder = tmp_path_factory.mktemp("short")
    experiments.write(folder, {"experiment.py": experiments.DROPOUT})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main.run(["ctl", "--config=experiment.py", "--config.train.steps=10"]) == 0
    return folder


def denied(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def full(*_, **__):
    raise tf.errors.ResourceExhaustedError(None, None, "x; No space left on device")


def deny_result(source, target, replace=os.replace):
    return denied() if "result" in str(target) else replace(source, target)


SUMMARIES, RESULT = "orbit.utils.SummaryManager", "runs/experiment/result.json"
FULL = "could not be written: No space left on device"
DENIED = "could not be written: Read-only file system"


@pytest.mark.parametrize(
    ("target", "error", "line"),
    [
        (f"{SUMMARIES}.flush", full, f"The summaries {FULL}"),
        (f"{SUMMARIES}.summary_writer", full, f"The summaries {FULL}"),
        ("ctl.loop.json_files._append", denied, f"runs/experiment/events.jsonl {DENIED}"),
        ("ctl.loop.json_files.os.replace", deny_result, f"{RESULT} {DENIED}"),
    ],
)
def test_disk_that_fails_during_a_run_ends_it_in_one_line(
    program, short_run, monkeypatch, target, error, line
):
    shutil.copytree(short_run / "runs", "runs")
    with monkeypatch.context() as planted:
        planted.setattr(target, error)
        code, _, err = program()
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"ctl: {line}. ")
    assert (INTACT if error is not deny_result else "ckpt-30, is intact") in err
    assert json.loads(pathlib.Path(RESULT).read_text())["step"] == 10


def test_unreadable_data_is_not_reported_as_an_unwritable_disk(program):
    error = 'tf.errors.PermissionDeniedError(None, None, "data; Permission denied")'
    hook = f"def train_loop_begin(self):\n        raise {error}\n\n    def build_model"
    text = f"import tensorflow as tf\n{experiments.DROPOUT}".replace("def build_model", hook)
    experiments.write(".", {"experiment.py": text})
    code, _, errors = program()
    assert code and "data; Permission denied" in errors and "workdir" not in errors
