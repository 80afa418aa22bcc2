"""What C++ code writes to standard error is hidden, unless the block fails."""

import contextlib
import os
import tempfile

import pytest

from ctl.hardware.quiet import hold_back_stderr
from tests.support import child


def write(text):
    """Writes to file descriptor 2, as TensorFlow's C++ code does."""
    os.write(2, text.encode())


@pytest.fixture(autouse=True)
def default_log_level(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)


@pytest.mark.parametrize(
    ("error", "printed"), [(None, ""), (KeyError, ""), (KeyboardInterrupt, "inside\n")]
)
def test_output_of_a_block_is_hidden_unless_it_fails_unexpectedly(capfd, error, printed):
    write("before\n")
    raised = pytest.raises(error) if error else contextlib.nullcontext()
    with raised, hold_back_stderr(LookupError):
        write("inside\n")
        if error:
            raise error
    write("after\n")
    assert capfd.readouterr().err == f"before\n{printed}after\n"


def test_the_lowest_log_level_prints_everything(monkeypatch, capfd):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with hold_back_stderr():
        write("inside\n")
        assert capfd.readouterr().err == "inside\n"


def test_crash_in_a_block_prints_where_it_was():
    code = "from ctl.hardware import quiet; import os\nwith quiet.hold_back_stderr(): os.abort()"
    done = child.run(["-c", code], TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode and "Fatal Python error: Aborted" in done.stderr


def test_nothing_is_hidden_without_a_folder_for_temporary_files(monkeypatch, capfd):
    def fail():
        raise FileNotFoundError("/no/folder")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with hold_back_stderr():
        write("inside\n")
    assert capfd.readouterr().err == "inside\n"


COMPILE = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
from ctl.hardware import quiet
quiet.hide_absl_messages()
import tensorflow as tf
print(tf.function(lambda x: x + 1, jit_compile=True)(1).numpy())
"""


@pytest.mark.slow
def test_messages_that_tensorflow_logs_by_absl_are_hidden():
    done = child.run(["-c", COMPILE], CUDA_VISIBLE_DEVICES="-1")
    assert (done.stdout, done.stderr) == ("2\n", "")
