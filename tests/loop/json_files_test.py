"""Files of JSON that are written completely or not at all; full_disk_test.py has full disks."""

import errno
import os
import pathlib

import pytest

from ctl.errors import UsageError
from ctl.loop import json_files
from ctl.loop.writers.json_lines import JsonLinesWriter


def test_replaced_file_has_the_last_content_and_no_sibling(tmp_path):
    path = tmp_path / "result.json"
    json_files.replace(path, {"step": 1, "eval": {"loss": 0.5}})
    json_files.replace(path, {"step": 2})
    assert json_files.read(path) == {"step": 2}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "replace",
    [
        lambda path: json_files.replace(path, {"step": 1}),
        lambda path: JsonLinesWriter(path.parent).restore(1),
    ],
    ids=["json", "lines"],
)
def test_content_is_on_the_disk_before_its_name_and_then_the_name(tmp_path, monkeypatch, replace):
    calls = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *_, name=name: calls.append(name))
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    replace(path)
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    ("owner", "name"), [(os, "replace"), (json_files, "create")], ids=["replace", "write"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch, owner, name, error):
    def fail(first, *_, **__):
        pathlib.Path(first).write_bytes(b"part")
        raise error

    path = tmp_path / "result.json"
    json_files.replace(path, {"step": 1})
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(type(error)):
        json_files.replace(path, {"step": 2})
    assert json_files.read(path) == {"step": 1}
    # A full disk has its space back; a killed process could not delete the file.
    temporary = tmp_path / json_files.temporary_name("result.json")
    assert temporary.exists() == isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "it is not a JSON object"),
        (b'{"step": \xff}', "can't decode byte"),
        (b'{"a": ' * 100_000, "it is nested too deeply"),
        (b'{"step": 1' + b"0" * 20 + b"}", "a number is too large"),
        (b'{"step": 1e999}', "step is float"),
        (b"{}", "step is NoneType"),
        (b'{"step": 1, "best": []}', "best is list"),
    ],
)
def test_damage_is_named_in_one_line_and_its_line_is_left_out(tmp_path, text, message):
    path, types = tmp_path / "result.json", dict(step=int, best=dict | None)
    path.write_bytes(b'{"step": 1}\n' + text + b'\n{"step": 2, "best": {}}\n')
    assert json_files.read_lines(path, **types) == [{"step": 1}, {"step": 2, "best": {}}]
    path.write_bytes(text)
    line = rf"result\.json cannot be read \(.*{message}.*fix it"
    with pytest.raises(UsageError, match=line) as error:
        json_files.read(path, **types)
    assert "\n" not in str(error.value)


def test_disk_that_fails_is_not_taken_for_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "read_bytes", unreadable)
    for read in (json_files.read, json_files.read_lines):
        (tmp_path / "result.json").touch()
        with pytest.raises(OSError, match="Stale file handle"):
            read(tmp_path / "result.json")


def unreadable(*_):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_line_after_one_that_a_kill_has_cut_short_is_complete(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"st')
    json_files.append_text(path, '{"step": 2}\n')
    json_files.append_text(path, '{"step": 3}\n')
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n'


def test_line_that_fits_only_in_part_is_not_appended(tmp_path):
    class FullFile:
        def __init__(self, content):
            self.content = content

        def seek(self, offset, whence):
            return len(self.content)

        def write(self, line):
            self.content += line[:3]
            return 3

        def truncate(self, size):
            self.content = self.content[:size]

    file = FullFile(b"first\n")
    with pytest.raises(OSError, match="No space left"):
        json_files._append(file, b"second\n")
    assert file.content == b"first\n"
