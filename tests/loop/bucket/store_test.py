"""ctl.loop.bucket.store: a folder of an object store."""

import json
import shutil
from typing import ClassVar

import fsspec
import pytest

import ctl
from ctl.errors import Failure, UsageError
from ctl.loop.bucket import store as stores
from ctl.loop.bucket.local import folder_of
from ctl.loop.bucket.store import open_folder


@pytest.fixture(params=["memory", "file", "root"])
def any_store(request, url, tmp_path, monkeypatch):
    """A folder in memory, and two in file systems that make no folders by themselves."""
    folder = tmp_path / "local"
    if request.param == "root":
        inside = fsspec.filesystem("dir", path=str(folder), target_protocol="file")
        monkeypatch.setattr(stores, "open_url", lambda url: (inside, ""))
    return open_folder(f"file://{folder}/a/run" if request.param == "file" else url)


def test_names_are_relative_to_the_folder(any_store, tmp_path):
    store = any_store
    (tmp_path / "file").write_bytes(b"12345")
    store.write("a.json", b"{}")
    store.upload(tmp_path / "file", "checkpoints/ckpt-1.index")
    assert store.list() == {"a.json": 2, "checkpoints/ckpt-1.index": 5}
    assert store.list("checkpoints") == {"ckpt-1.index": 5}
    assert store.download("checkpoints/ckpt-1.index", tmp_path / "new" / "file")
    assert not store.download("missing", tmp_path / "new" / "missing")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_bytes() == b"12345"
    store.remove(["a.json", "missing"])
    assert store.read("a.json") is None and store.list("missing") == {}


def test_only_the_first_creates_an_object(any_store):
    store = any_store
    assert store.create("owner/1", b"first")
    assert not store.create("owner/1", b"second")
    assert store.read("owner/1") == b"first"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket", "nosuch://bucket cannot be opened .*: install the fsspec package"),
        ("gs:/bucket/run", "gs:/bucket/run is no URL: write ://"),
    ],
)
def test_url_that_cannot_be_opened_is_one_line(url, message):
    with pytest.raises(UsageError, match=message):
        open_folder(url)


def test_missing_package_is_named_with_its_extra(monkeypatch):
    def fail(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(UsageError, match=r"pip install 'ctl-tensorflow\[s3\]'"):
        open_folder("s3://bucket/run")


def test_error_that_may_pass_is_tried_again_and_a_wrong_name_is_not(
    store, quick, monkeypatch, capsys
):
    errors = [OSError("503 Slow Down"), TimeoutError(), OSError("no connection")]

    def call():
        if errors:
            raise errors.pop()
        return "done"

    monkeypatch.setattr(store, "connect", call)
    assert store.retry(call) == "done"
    assert "503 Slow Down; trying again" in capsys.readouterr().out

    def always(error):
        raise error

    with pytest.raises(Failure, match=r"cannot be reached .*503"):
        store.retry(always, OSError("503"))
    with pytest.raises(UsageError, match=r"cannot be used .*check the name, the permissions"):
        store.retry(always, PermissionError("403"))


class Shelf(ctl.Store, scheme="shelf"):
    """A store of your own: what a run needs of it are these methods."""

    content: ClassVar = {}

    def list(self, folder=""):
        start = f"{self.url}/{folder}".rstrip("/") + "/"
        found = {k: v for k, v in self.content.items() if k.startswith(start)}
        return {k.removeprefix(start): len(v) for k, v in found.items()}

    def read(self, name):
        return self.content.get(f"{self.url}/{name}")

    def write(self, name, content):
        self.content[f"{self.url}/{name}"] = content

    def create(self, name, content):
        return self.content.setdefault(f"{self.url}/{name}", content) is content

    def upload(self, path, name):
        self.write(name, path.read_bytes())

    def download(self, name, path):
        content = self.read(name)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return content is not None

    def remove(self, names):
        for name in names:
            self.content.pop(f"{self.url}/{name}", None)


@pytest.mark.parametrize("scheme", ["shelf", pytest.param("file", marks=pytest.mark.slow)])
def test_run_is_resumed_from_a_store(scheme, program, tmp_path, monkeypatch, quick):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{scheme}://{tmp_path}/bucket/run"
    for steps in (2, 4):
        code, _, error = program(f"--workdir={url}", f"--config.train.steps={steps}")
        assert code == 0, error
        shutil.rmtree(folder_of(url, "train"))
    result = json.loads(open_folder(url).read("result.json"))
    assert result["step"] == 4 and "checkpoints/ckpt-4.whole" in open_folder(url).list()
