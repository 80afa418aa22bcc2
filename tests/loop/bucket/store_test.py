"""ctl.loop.bucket.store: a folder of an object store."""

import pytest

from ctl.errors import Failure, UsageError
from ctl.loop.bucket import store as stores
from ctl.loop.bucket.store import Store


def test_names_are_relative_to_the_folder(store, tmp_path):
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


def test_only_the_first_creates_an_object(store):
    assert store.create("owner/1", b"first")
    assert not store.create("owner/1", b"second")
    assert store.read("owner/1") == b"first"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "nosuch://bucket",
            "nosuch://bucket cannot be opened .*: install the fsspec package of this",
        ),
        ("gs:/bucket/run", "gs:/bucket/run is no URL: write ://"),
    ],
)
def test_url_that_cannot_be_opened_is_one_line(url, message):
    with pytest.raises(UsageError, match=message):
        Store(url)


def test_missing_package_is_named_with_its_extra(monkeypatch):
    def fail(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(UsageError, match=r"pip install 'ctl-tensorflow\[s3\]'"):
        Store("s3://bucket/run")


def test_error_that_may_pass_is_tried_again_and_a_wrong_name_is_not(store, monkeypatch, capsys):
    errors = [OSError("503 Slow Down"), TimeoutError()]

    def call():
        if errors:
            raise errors.pop()
        return "done"

    monkeypatch.setattr(stores, "_DELAYS", (0.001, 0.001))
    assert store.retry(call) == "done"
    assert "503 Slow Down; trying again" in capsys.readouterr().out

    def always(error):
        raise error

    with pytest.raises(Failure, match=r"cannot be reached .*503"):
        store.retry(always, OSError("503"))
    with pytest.raises(UsageError, match=r"cannot be used .*check the name, the permissions"):
        store.retry(always, PermissionError("403"))
