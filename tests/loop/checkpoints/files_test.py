"""Which checkpoints are complete, and what is reported if something cannot be written."""

import errno
import json
import os
import pathlib

import pytest
import tensorflow as tf

from ctl.errors import Failure, UsageError
from ctl.loop.checkpoints.files import CheckpointFiles, find_files, hold, report_write_errors


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def write(folder, step, *, commit=True):
    folder.mkdir(exist_ok=True)
    (folder / f"ckpt-{step}.index").write_bytes(b"i" * 10)
    (folder / f"ckpt-{step}.data-00000-of-00001").write_bytes(b"d" * step)
    if commit:
        CheckpointFiles(folder).commit(step)


def test_checkpoint_with_a_marker_is_complete(folder):
    write(folder, 100)
    write(folder, 20)
    write(folder, 300, commit=False)
    assert CheckpointFiles(folder).steps() == [20, 100]
    assert CheckpointFiles(folder).faults() == {300: "it was not written to the end"}
    assert CheckpointFiles(folder).damaged() == []
    assert json.loads((folder / "ckpt-20.whole").read_text()) == {
        "files": {"ckpt-20.index": 10, "ckpt-20.data-00000-of-00001": 20}
    }


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("index", None, "ckpt-9.index is missing"),
        ("index", b"i", "ckpt-9.index has 1 bytes, not 10"),
        ("whole", b"[1]", "its marker cannot be read"),
        ("whole", b'{"files": {}}', "its marker lists no files"),
        ("whole", b"\xff\xfe", "its marker cannot be read"),
        ("whole", b'{"files": {"../x": 1}}',
         "its marker names '../x', which is no file of a checkpoint"),
    ],
)  # fmt: skip
def test_damage_is_detected_and_named(folder, name, content, fault):
    write(folder, 5)
    write(folder, 9)
    path = folder / f"ckpt-9.{name}"
    path.unlink() if content is None else path.write_bytes(content)
    assert CheckpointFiles(folder).steps() == [5]
    assert CheckpointFiles(folder).faults() == {9: fault}
    assert CheckpointFiles(folder).damaged() == [9]


def test_pruning_keeps_the_newest_and_multiples_of_keep_every(folder):
    for step in (10, 20, 30, 40, 50, 60):
        write(folder, step)
    CheckpointFiles(folder).prune(keep=2, keep_every=30)
    assert CheckpointFiles(folder).steps() == [30, 50, 60]
    CheckpointFiles(folder).prune(keep=2, keep_every=0)
    assert CheckpointFiles(folder).steps() == [50, 60]


def test_pruning_removes_what_a_kill_left_but_nothing_newer_and_nothing_foreign(folder):
    write(folder, 10, commit=False)
    (folder / "ckpt-10.new").touch()
    (folder / "ckpt-12.index").write_bytes(b"of another program")
    write(folder, 14)
    (folder / "ckpt-14.whole").write_text("damaged")
    (folder / "ckpt-15_temp").mkdir()
    (folder / "ckpt-15_temp/part-00000-of-00001.data-00000-of-00001").write_bytes(b"d")
    (folder / "ckpt-15.new").touch()
    write(folder, 20)
    write(folder, 30, commit=False)
    (folder / "notes.txt").write_text("mine")
    CheckpointFiles(folder).prune(keep=1, keep_every=0)
    assert sorted(p.name for p in folder.iterdir()) == [
        "ckpt-12.index", "ckpt-14.data-00000-of-00001", "ckpt-14.index", "ckpt-14.whole",
        "ckpt-20.data-00000-of-00001", "ckpt-20.index", "ckpt-20.whole",
        "ckpt-30.data-00000-of-00001", "ckpt-30.index", "notes.txt",
    ]  # fmt: skip


def test_kill_while_a_checkpoint_is_removed_leaves_it_incomplete(folder, monkeypatch):
    write(folder, 10)
    removed = []
    unlink = type(folder).unlink

    def die_after_one(path, *arguments):
        if removed:
            raise KeyboardInterrupt
        removed.append(path.name)
        unlink(path, *arguments)

    monkeypatch.setattr(type(folder), "unlink", die_after_one)
    with pytest.raises(KeyboardInterrupt):
        CheckpointFiles(folder).remove(10)
    assert len(removed) == 1 and CheckpointFiles(folder).damaged() == []
    monkeypatch.undo()
    write(folder, 20)
    CheckpointFiles(folder).prune(keep=1, keep_every=0)
    assert CheckpointFiles(folder).present() == {20}


@pytest.mark.parametrize("name", ["read_bytes", "stat"])
def test_checkpoint_that_cannot_be_read_at_present_is_neither_damaged_nor_deleted(
    folder, monkeypatch, name
):
    for step in (10, 20, 30):
        write(folder, step)
    original = getattr(type(folder), name)

    def fail_once(path, *arguments, **options):
        if path.name.startswith("ckpt-20"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(path, *arguments, **options)

    files = CheckpointFiles(folder)
    with monkeypatch.context() as planted:
        planted.setattr(type(folder), name, fail_once)
        for call in (files.steps, files.faults, lambda: files.prune(keep=1, keep_every=0)):
            with pytest.raises(OSError, match="Stale"):
                call()
    assert files.steps() == [10, 20, 30]


def test_checkpoints_of_another_program_are_refused_unless_some_are_of_ctl(folder):
    write(folder, 7, commit=False)
    with pytest.raises(UsageError, match=r"ckpt-7 .* older ctl .* --fresh; .*CheckpointManager"):
        CheckpointFiles(folder).begin(7)
    write(folder, 9)
    CheckpointFiles(folder).begin(7)
    assert sorted(p.name for p in folder.glob("ckpt-7*")) == ["ckpt-7.new"]


def test_held_checkpoint_can_be_read_after_it_was_deleted(folder):
    write(folder, 7)
    files = CheckpointFiles(folder)
    with hold(files.path(7)) as held:
        files.remove(7)
        assert pathlib.Path(f"{held}.index").read_bytes() == b"i" * 10
        assert find_files(os.path.dirname(held)).steps() == [7]
    assert not os.path.exists(os.path.dirname(held)) or held == files.path(7)


def report(error, folder=None):
    with pytest.raises(Failure) as failure, report_write_errors("The file", folder):
        raise error
    return str(failure.value)


def test_only_a_complete_checkpoint_is_intact(folder):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "No checkpoint exists yet" in report(full, folder)
    write(folder, 7)
    assert f"The last complete checkpoint, {folder / 'ckpt-7'}, is intact." in report(full, folder)
    (folder / "ckpt-7.index").unlink()
    assert "No checkpoint exists yet" in report(full, folder)


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.EROFS, "Make it writable"), (errno.EDQUOT, "Free some space")]
)
def test_message_has_the_reason_and_the_fix(number, fix):
    reason = os.strerror(number)
    line = f"The file could not be written: {reason}. {fix}, then rerun the same command."
    assert report(OSError(number, reason)).replace(" No checkpoint exists yet.", "") == line


@pytest.mark.parametrize(
    "error", [tf.errors.UnavailableError(None, None, "gone"), KeyError("No space left on device")]
)
def test_other_errors_are_raised_as_they_are(error):
    with pytest.raises(type(error)), report_write_errors("The file", None):
        raise error
