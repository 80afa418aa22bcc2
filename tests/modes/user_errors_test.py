"""An exception of the user's code is one line with the user's own line; its traceback is in a file."""

import re
import tempfile

import pytest
import tensorflow as tf

from ctl import main
from ctl.errors import Failure, LostWorker, UsageError
from ctl.hardware import cluster
from ctl.loop.workdir import Workdir
from ctl.modes.user_errors import report_lost_worker, report_user_errors
from tests.support import experiments

DATA = 'ctl.data.arrays({"x": [[1.0, 2.0, 3.0]] * 8, "label": [0, 1] * 4})'
DATASET = 'tf.data.Dataset.from_tensor_slices({"x": tf.ones([8, 3]), "label": [0, 1] * 4})'
GENERATOR = (
    'tf.data.Dataset.from_generator(lambda: ({"x": [1.0] * 3, "label": 1 // (i % 7)} for i in range(8)),'
    ' output_signature={"x": tf.TensorSpec([3]), "label": tf.TensorSpec([], tf.int64)})'
)
LOSS = "return tf_keras.losses"


@pytest.fixture(autouse=True)
def temporary_files(tmp_path_factory, monkeypatch):
    """The folder for temporary files, so that the tests leave none behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


def run(folder, old, new, *flags):
    """Trains the tiny experiment for 4 steps, with one change in its trainer's file."""
    assert old in experiments.TRAINER
    text = experiments.TRAINER.replace(old, new).replace(
        "import ctl", "import tensorflow as tf, ctl"
    )
    experiments.write(folder, {"exp.py": experiments.CONFIG, "tiny.py": text})
    steps = ("--config.train.steps=4", "--config.train.steps_per_loop=2")
    return main.run(["ctl", "--config=exp.py", *steps, *flags])


# Each: what is replaced, by what, the line, the exit code.
MISTAKES = {
    "build_model raises": ("return tf_keras.Seq", "oops\n        return tf_keras.Seq",
        "tiny.py:6: NameError: name 'oops' is not defined", 2),
    "the step raises": (LOSS, f"raise ValueError('one\\ntwo')\n        {LOSS}",
        "tiny.py:12: ValueError: one", 2),
    "a function of the dataset raises": (DATA, f'{DATASET}.map(lambda e: {{**e, "x": e["z"]}})',
        "tiny.py:9: The batch has no 'z': expected one of x, label. (", 2),
    "a generator raises": (DATA, GENERATOR,
        "tiny.py:9: ZeroDivisionError: integer division or modulo by zero", 1),
    "tf_keras rejects a layer's input": ("def per_example", 'def forward(self, batch, training):\n'
        '        return self.model(batch["x"][:, :2], training=training)\n\n    def per_example',
        'tiny.py:12: ValueError: Input 0 of layer "sequential', 2),
    "a layer raises inside of tf_keras": ("tf_keras.layers.Dense(2,",
        "tf_keras.layers.Lambda(lambda x: tf.reshape(x, [7])),tf_keras.layers.Dense(2,",
        "tiny.py:6: ValueError: Dimension size must be evenly divisible by 3 but is 7", 2),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "code"), MISTAKES.values(), ids=MISTAKES)
def test_exception_of_the_users_code_is_reported_in_one_line(
    old, new, line, code, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, old, new) == code
    printed = capfd.readouterr().err
    # AutoGraph converts equal code once per process, so the path may be that of an earlier test.
    assert re.match(rf"ctl: (\S*/)?{re.escape(line)}", printed), printed
    assert printed.count("\n") == 1
    assert "Traceback (most recent call last)" in read_traceback(printed)


def read_traceback(printed):
    (path,) = re.findall(r"\(traceback: (.*)\)$", printed)
    with open(path) as file:
        return file.read()


def test_traceback_is_in_the_workdir_once_the_run_has_started(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run(tmp_path, "return tf_keras.Seq", "oops\n        return tf_keras.Seq", "--workdir=here")
    assert "name 'oops' is not defined" in read_traceback(capfd.readouterr().err)
    assert not (tmp_path / "here").exists()
    run(tmp_path, LOSS, f"raise ValueError('one')\n        {LOSS}", "--workdir=here")
    assert capfd.readouterr().err.endswith("(traceback: here/traceback.txt)\n")
    assert "ValueError: one" in (tmp_path / "here/traceback.txt").read_text()


def raise_in_users_code(error, folder):
    """Raises an exception in a file that is neither ctl's nor a library's."""
    file = str(folder / "net.py")
    exec(compile("def fail(error):\n    raise error\n", file, "exec"), names := {})
    names["fail"](error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a"), UsageError),
        (FileNotFoundError("a"), UsageError),
        (ConnectionError("a"), Failure),
        (MemoryError(), Failure),
        (tf.errors.InvalidArgumentError(None, None, "a"), UsageError),
        (tf.errors.NotFoundError(None, None, "a"), UsageError),
        (tf.errors.UnknownError(None, None, "a"), Failure),
    ],
)
def test_error_that_may_not_recur_is_a_failure_and_others_are_mistakes(error, expected, tmp_path):
    line = rf"net.py:2: {type(error).__name__}.*\(traceback: /"
    with pytest.raises(expected, match=line), report_user_errors(None):
        raise_in_users_code(error, tmp_path)


@pytest.mark.parametrize("error", [UsageError("a"), Failure("a"), LostWorker("a")])
def test_error_that_is_one_line_already_is_unchanged(error, tmp_path):
    with pytest.raises(type(error)) as caught, report_user_errors(None):
        raise_in_users_code(error, tmp_path)
    assert caught.value is error


def test_bug_of_ctl_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctl.modes.train.ExperimentRun", None)  # a TypeError in a line of ctl
    with pytest.raises(TypeError, match="not callable"):
        run(tmp_path, LOSS, LOSS)


def test_traceback_that_cannot_be_written_to_the_workdir_is_written_elsewhere(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "traceback.txt").mkdir()
    with pytest.raises(UsageError) as caught, report_user_errors(Workdir(tmp_path)):
        raise_in_users_code(ValueError("a"), tmp_path)
    assert "ValueError: a" in read_traceback(str(caught.value))


def test_traceback_of_a_launched_process_is_outside_of_the_folder_that_the_launcher_deletes(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CTL_TRACEBACK_FOLDER", str(tmp_path))
    with pytest.raises(UsageError, match=f"traceback: {tmp_path}"), report_user_errors(None):
        raise ValueError("planted")


CHIEF = cluster.make_local_clusters(workers=3, servers=0, ports=[1, 2, 3])[0]


def raise_in_block(error, processes=CHIEF):
    with report_lost_worker(processes):
        raise error


UNAVAILABLE = tf.errors.UnavailableError
HEARTBEAT = "Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat"


@pytest.mark.parametrize(
    ("cls", "message", "names"),
    [
        (UNAVAILABLE, "failed to connect to /job:worker/replica:0/task:1: x", "worker 1"),
        (tf.errors.AbortedError, "/job:worker/task:1", "worker 1"),
        (tf.errors.CancelledError, "/job:worker/task:1", "worker 1"),
        (tf.errors.DeadlineExceededError, "/job:worker/task:1", "worker 1"),
        (UNAVAILABLE, "/job:worker/task:2 and /job:worker/task:1 are out", "worker 1, worker 2"),
        # Heartbeats go to the first process, which is this one.
        (UNAVAILABLE, HEARTBEAT, "another process"),
        # Later collectives fail for the same reason.
        (tf.errors.InternalError, "Collective ops is aborted by: x", "another process"),
    ],
)
def test_lost_processes_are_named(cls, message, names):
    with pytest.raises(LostWorker, match=f"worker 0 stops, because {names} has ended or cannot be"):
        raise_in_block(cls(None, None, message))


def test_process_whose_heartbeats_fail_names_the_first_one():
    worker = cluster.make_local_clusters(workers=3, servers=0, ports=[1, 2, 3])[1]
    error = tf.errors.DeadlineExceededError(None, None, HEARTBEAT)
    with pytest.raises(LostWorker, match=r"worker 1 stops, .*worker 0"):
        raise_in_block(error, worker)


@pytest.mark.parametrize(
    ("error", "processes"),
    [
        (tf.errors.UnavailableError(None, None, "x"), None),  # a run of one process
        (tf.errors.InvalidArgumentError(None, None, "x"), CHIEF),
        (ValueError("x"), CHIEF),
    ],
)
def test_other_errors_are_not_changed(error, processes):
    with pytest.raises(type(error)):
        raise_in_block(error, processes)
