"""ctl.loop.bucket.upload and fetch: which checkpoints are copied, and in which order."""

import functools
import types

import pytest

from ctl.errors import UsageError
from ctl.loop.bucket import fetch
from ctl.loop.bucket.local import LocalCopy
from ctl.loop.bucket.upload import Uploader
from ctl.loop.checkpoints.files import CheckpointFiles


@pytest.fixture
def local(url, tmp_path):
    return LocalCopy(url, tmp_path / "run")


def save(local, *steps, where="checkpoints"):
    folder = local.folder / where
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        (folder / f"ckpt-{step}.index").write_text(f"{step}")
        (folder / f"ckpt-{step}.data-00000-of-00001").write_text("x" * step)
        CheckpointFiles(folder).commit(step)


def upload(local, keep_every=0):
    """An uploader, without its thread, and the steps that it has reported."""
    durable = []
    owner = types.SimpleNamespace(number=1, check=lambda: None)
    rule = dict(keep=2, keep_every=keep_every)
    functions = dict(on_durable=lambda step, *_: durable.append(step), print_line=print)
    return Uploader(local, owner, **rule, **functions), durable


def test_newest_checkpoint_is_copied_and_older_ones_are_passed_over(local):
    save(local, 10, 20, 30)
    for step in (4, 5, 60):
        local.store.write(f"checkpoints/ckpt-{step}.index", b"left by a killed run")
    local.store.write("checkpoints/ckpt-4.whole", b"{}")
    original = local.store.list

    def list_late(where=""):
        return {name: size for name, size in original(where).items() if "4.whole" not in name}

    local.store.list = list_late
    uploader, durable = upload(local)
    assert uploader.copy()
    save(local, 40, 50)
    assert uploader.copy() and not uploader.copy()
    assert durable == fetch.steps(local.store.list()) == [30, 50]
    left = {step: f"checkpoints/ckpt-{step}.index" in local.store.list() for step in (4, 5, 60)}
    assert left == {4: True, 5: False, 60: True}


def test_metrics_are_copied_before_the_checkpoint_that_follows_them(local):
    save(local, 10)
    (uploader, _), metrics = upload(local), local.folder / "metrics.jsonl"
    uploader.copy(logs=True)
    metrics.write_text("10\n")
    assert not uploader.copy()  # it grows with each loop, and is not copied with each
    save(local, 20)
    names, original = [], local.store.write
    local.store.write = lambda name, content: names.append(name) or original(name, content)
    upload_file = local.store.upload
    local.store.upload = lambda path, name: names.append(name) or upload_file(path, name)
    assert uploader.copy()
    assert names.index("metrics.jsonl") < names.index("checkpoints/ckpt-20.whole")
    assert local.store.read("metrics.jsonl") == b"10\n"


def test_checkpoints_to_keep_are_copied_after_the_newest_one(local):
    save(local, 10, 20, 30, 40, 50)
    save(local, 10, 30, where="best")
    uploader, durable = upload(local, keep_every=20)
    uploader.copy()
    assert durable == [50, 40, 20]
    assert fetch.steps(local.store.list()) == [20, 40, 50]
    assert fetch.steps(local.store.list(), "best") == [10, 30]


def test_checkpoint_that_is_saved_again_is_copied_again(local):
    save(local, 10)
    uploader, durable = upload(local)
    uploader.copy()
    (local.folder / "checkpoints/ckpt-10.index").write_text("other")
    CheckpointFiles(local.folder / "checkpoints").commit(10)
    uploader.copy()
    assert durable == [10, 10] and local.store.read("checkpoints/ckpt-10.index") == b"other"


def test_upload_that_arrives_cut_is_not_durable_and_is_tried_again(local, monkeypatch):
    save(local, 10)
    (local.folder / "metrics.jsonl").write_text("{}\n")
    uploader, durable = upload(local)
    original = type(local.store).upload

    def cut(store, end, path, name):
        original(store, path, name)
        if name.endswith(end):
            store.write(name, b"")

    for end, fault in (
        (".jsonl", r"metrics\.jsonl has 0 bytes, not 3"),
        (".index", r"ckpt-10\.index has 0 bytes, not 2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(local.store), "upload", functools.partialmethod(cut, end))
            with pytest.raises(OSError, match=fault):
                uploader.copy()
        assert not durable and not fetch.steps(local.store.list())
    assert local.store.read("metrics.jsonl") == b"{}\n"
    uploader.copy()
    assert durable == [10] and local.store.read("checkpoints/ckpt-10.index") == b"10"


def test_half_copied_damaged_and_deleted_checkpoints_are_passed_over_with_a_line(
    local, tmp_path, capsys
):
    store, other = local.store, LocalCopy(local.store.url, tmp_path / "other")
    save(local, 10, 20, 30, 40)
    upload(local, keep_every=10)[0].copy()
    store.remove(["checkpoints/ckpt-40.whole"])  # killed before the marker
    store.write("checkpoints/ckpt-30.index", b"31")
    lists = {where: store.list(where) for where in ("", "checkpoints")}
    other.store.list = lambda where="": lists[where]  # before the run deleted this file:
    store.remove(["checkpoints/ckpt-20.data-00000-of-00001"])
    fetch.run(other)
    line = f"Skipped {store.url}/checkpoints/ckpt-"
    assert capsys.readouterr().out.splitlines() == [
        f"{line}30: ckpt-30.index does not have the checksum of its marker.",
        f"{line}20: ckpt-20.data-00000-of-00001 was deleted.",
    ]
    names = {path.name.partition(".")[0] for path in (other.folder / "checkpoints").iterdir()}
    assert names == {"ckpt-10"}


def test_damaged_checkpoints_of_a_store_are_no_new_beginning(local, tmp_path):
    store, other = local.store, LocalCopy(local.store.url, tmp_path / "other")
    save(local, 10, 20)
    upload(local, keep_every=10)[0].copy()
    for step in (10, 20):
        store.write(f"checkpoints/ckpt-{step}.whole", b'{"fi')
    with pytest.raises(UsageError, match="none of them can be read"):
        fetch.run(other)


def test_best_checkpoint_that_is_damaged_here_is_not_deleted_in_the_store(local):
    save(local, 10)
    save(local, 5, 10, where="best")
    uploader, _ = upload(local)
    uploader.copy()
    (local.folder / "best/ckpt-5.whole").write_bytes(b"damaged")
    CheckpointFiles(local.folder / "best").remove(10)
    save(local, 20)
    uploader.copy()
    assert fetch.steps(local.store.list(), "best") == [5]


def test_checkpoints_that_cannot_be_fetched_replace_no_good_ones(local, tmp_path, capsys):
    store, other = local.store, LocalCopy(local.store.url, tmp_path / "other")
    save(local, 20, 30)
    save(local, 5, 10, where="best")
    upload(local, keep_every=10)[0].copy()
    for name in ("checkpoints/ckpt-30.index", "best/ckpt-5.index"):
        store.write(name, b"#" * len(store.read(name)))
    fetch.run(other)
    other.mark_sent()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ckpt")[0] for line in lines] == [
        f"Skipped {store.url}/checkpoints/ckpt-30", f"Skipped {store.url}/best/ckpt-5",
    ]  # fmt: skip
    uploader, _ = upload(other)
    uploader.keep = 1
    uploader.copy(logs=True)
    assert fetch.steps(store.list()) == [20]
    assert fetch.steps(store.list(), "best") == [5, 10]
    # One that is saved, but not yet copied, protects none.
    save(other, 40)
    store.write("checkpoints/ckpt-30.index", b"30")
    store.write("checkpoints/ckpt-30.whole", b"{}")
    uploader._prune()
    assert fetch.steps(store.list()) == [20]
