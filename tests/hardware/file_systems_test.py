"""Opening URLs, and creating local files."""

import errno
import os

import pytest

from ctl.commands import report
from ctl.data.cache import _fill
from ctl.errors import UsageError
from ctl.hardware import file_systems
from ctl.loop import json_files
from ctl.loop.bucket.bucket import Bucket
from ctl.loop.bucket.local import folder_of
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.writers.json_lines import JsonLinesWriter


def write_marker(folder):
    (folder / "ckpt-1.index").write_text("x")
    CheckpointFiles(folder).commit(1)


def restore_metrics(folder):
    (folder / "metrics.jsonl").write_text("")
    JsonLinesWriter(folder).restore(0)


def fill_cache(folder):
    with pytest.raises(AttributeError):  # None has no examples: the file is created before
        _fill(None, None, str(folder / "c"))


WRITERS = {
    ".config.json.new": lambda folder: json_files.replace(folder / "config.json", {}),
    "ckpt-1.new": write_marker,
    ".metrics.jsonl.new": restore_metrics,
    ".report.html.new": lambda folder: report._write(folder / "report.html", "page"),
    "c.incomplete": fill_cache,
}


@pytest.mark.parametrize("name", WRITERS)
def test_link_at_the_path_of_a_temporary_file_is_not_followed(tmp_path, name):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "precious")
    WRITERS[name](tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / name).exists()


def test_file_that_someone_else_creates_at_the_same_time_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: os.symlink("x", tmp_path / "a"))
    with pytest.raises(OSError) as error:
        file_systems.create(tmp_path / "a")
    assert error.value.errno == errno.EEXIST


def test_url_with_credentials_is_rejected_before_a_folder_has_its_name(tmp_path, monkeypatch):
    class Train:
        local_dir = ""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"^memory://\*\*\*@bucket/run .*credentials"):
        Bucket("memory://key:secret@bucket/run", Train)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["gs://bucket/..", "gs://bucket/run/.", "gs://bucket/"])
def test_local_folder_of_a_url_is_in_its_own_folder(url):
    assert ".." not in folder_of(url, "read").parts
    assert folder_of(url, "read").parent.name == "read"
