"""Which errors are those of a disk, and that names are on it."""

import errno
import os

import pytest
import tensorflow as tf

from ctl.errors import Failure
from ctl.loop import disk

NODE = "{{function_node __wrapped__SaveV2_device_/job:localhost/device:CPU:0}} "


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError("Can't write data (error message = 'No space left on device')"),
         "No space left on device"),
        (RuntimeError("Can't decrement id (error message = 'File too large')"), "File too large"),
        (tf.errors.UnknownError(None, None, f"{NODE}a/b; Input/output error [Op:SaveV2]"),
         "Input/output error"),
        (tf.errors.AbortedError(None, None, "a/b; Stale file handle"), "Stale file handle"),
        # A device without memory, a lost process, a mistake, and a line that was made already.
        (tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor"), None),
        (tf.errors.UnavailableError(None, None, "Connection reset by peer"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (KeyError("No space left on device"), None),
        (Failure("a could not be written: No space left on device."), None),
    ],
)  # fmt: skip
def test_reason_is_what_the_system_says_about_a_disk(error, reason):
    assert disk.find_reason(error) == reason


def test_any_error_of_a_block_that_only_writes_has_a_reason_of_one_line():
    full = tf.errors.ResourceExhaustedError(None, None, f"{NODE}quota\nmore [Op:SaveV2]")
    assert disk.find_reason(full, writes=True) == "quota"
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert disk.find_reason(missing, writes=True) == "No such file or directory"


def test_file_that_cannot_be_read_is_named_with_what_to_do():
    line = str(disk.read_failure("run/a", "Permission denied"))
    assert line.startswith("run/a cannot be read: Permission denied. Make it readable")
    assert "Allow more open files" in str(disk.read_failure("run/a", "Too many open files"))


def test_names_of_new_folders_are_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    for _ in range(2):
        disk.make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
