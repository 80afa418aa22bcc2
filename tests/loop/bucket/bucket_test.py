"""A run whose --workdir is a URL, in this process: its objects, its resumption, and who may write."""

import json
import os
import pathlib
import shutil
import time
import types

import fsspec
import numpy as np
import pytest
import tf_keras

import ctl
from ctl import main
from ctl.configs import keys
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.bucket import bucket, fetch, ownership, upload
from ctl.loop.bucket.local import LocalCopy, folder_of
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.loop.shared import OtherProcesses
from tests.support import experiments

ENDINGS = ("data-00000-of-00001", "index", "whole")
BEST = ("--config.train.best.metric=eval/loss", "--config.train.best.mode=min")


def train(program, url, steps, *flags):
    code, out, error = program(f"--workdir={url}", f"--config.train.steps={steps}", *flags)
    assert code == 0, error
    return out


def remove_local(url):
    shutil.rmtree(folder_of(url, "train"))


def read_weights(store, step):
    """The variables in a checkpoint of the store, from a copy of its own."""
    folder = pathlib.Path(fetch.path(store.url, str(step)))
    return experiments.read_weights(folder, step)


@pytest.fixture
def in_step(quick, monkeypatch):
    """Each save waits until it is in the store: on a busy machine the next one would replace it."""
    commit, objects = CheckpointFiles.commit, fsspec.filesystem("memory").store

    def commit_and_wait(self, step, notes=None):
        commit(self, step, notes)
        path = pathlib.Path(self.path(step))
        end = f"/{path.parent.name}/{path.name}.whole"
        while "cache" in path.parts and not any(name.endswith(end) for name in list(objects)):
            time.sleep(0.01)

    monkeypatch.setattr(CheckpointFiles, "commit", commit_and_wait)


@pytest.mark.slow
def test_everything_that_is_complete_is_in_the_store_when_a_run_ends(program, store, in_step):
    keep = ("--config.train.checkpoints_to_keep=1", "--config.train.checkpoint_keep_every=20")
    out = train(program, store.url, 30, *BEST, *keep)
    names = store.list()
    for name in ("config.json", "result.json", "events.jsonl", "metrics.jsonl"):
        assert store.read(name) == (folder_of(store.url, "train") / name).read_bytes()
    kept = {f"ckpt-{step}.{end}" for step in (20, 30) for end in ENDINGS}
    assert store.list("checkpoints").keys() == kept
    assert any(name.startswith("best/") for name in names)
    assert any(name.startswith("summaries/train/events.out") for name in names)
    assert not any("run.lock" in name or ".upload" in name for name in names)
    marker = json.loads(store.read("checkpoints/ckpt-30.whole"))
    assert marker["crc32c"].keys() == marker["files"].keys()
    events = [json.loads(line) for line in store.read("events.jsonl").splitlines()]
    durable = [event for event in events if event["event"] == "durable"]
    assert [event["step"] for event in durable] == [10, 20, 30]
    assert durable[-1]["path"] == f"{store.url}/checkpoints/ckpt-30"
    assert f"Done: {store.url}/result.json" in out


@pytest.mark.slow
def test_run_continues_on_another_machine_with_the_bits_of_an_undisturbed_run(
    program, store, quick, monkeypatch
):
    assert program("--workdir=whole", "--config.train.steps=20")[0] == 0
    train(program, store.url, 10)
    remove_local(store.url)
    before, uploads = store.list(), []
    with monkeypatch.context() as patch:
        patch.setattr(
            type(store), "upload", lambda self, path, name: uploads.append((self.url, name))
        )
        code, _, error = program(f"--workdir={store.url}", "--config.seed=1")
    assert code == 2 and "holds a run with another config (seed: 0 -> 1)" in error
    assert store.url not in dict(uploads)  # what was fetched is not copied again
    assert {n: s for n, s in store.list().items() if "owner" not in n}.items() <= before.items()

    remove_local(store.url)
    out = train(program, store.url, 20)
    assert "Resumed from" in out and "ckpt-10" in out
    assert CheckpointFiles(folder_of(store.url, "train") / "checkpoints").steps() == [10, 20]
    expected, actual = experiments.read_weights("whole", 20), read_weights(store, 20)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value)
    remove_local(store.url)
    assert "This run is complete" in train(program, store.url, 20)


def open_bucket(url):
    """Owns the run as a process does that trains nothing; returns its local folder."""
    opened = bucket.Bucket(url, keys.defaults().train)
    functions = dict(on_lost=print, on_durable=print, print_line=print)
    with opened.all_open(ProcessGroup(), **functions):
        return opened.folder


def test_local_folder_is_used_again_only_if_no_other_machine_has_continued_the_run(store, quick):
    store.write("config.json", b"{}")
    local = open_bucket(store.url)
    (local / "mine").touch()
    open_bucket(store.url)
    assert (local / "mine").exists()
    local.rename(local.with_name("first"))
    open_bucket(store.url)
    shutil.rmtree(local)
    local.with_name("first").rename(local)  # as the first machine has it
    store.remove(["mine"])
    open_bucket(store.url)
    assert (local / "config.json").exists() and not (local / "mine").exists()
    message = rf"is the local folder of memory://other, but has {store.url}"
    with pytest.raises(ctl.UsageError, match=message):
        LocalCopy("memory://other", local).is_current(1)


@pytest.mark.slow
def test_run_whose_upload_fails_ends_with_1_and_the_same_command_copies_the_rest(
    program, store, quick, monkeypatch
):
    monkeypatch.setattr(ownership, "_has_ended", lambda holder: True)  # this process goes on
    flags = (f"--workdir={store.url}", "--config.train.steps=10")
    calls = []

    def fail(store, path, name):
        calls.append(name)
        raise OSError("503 Slow Down")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "upload", fail)
        code, out, error = program(*flags, "--config.train.upload_grace=0.3")
    assert code == 1
    assert f"{store.url} is not complete after 0 s (OSError: 503 Slow Down): rerun" in error
    assert out.count("cannot be written (OSError: 503 Slow Down): trying again.") == 1
    assert "result.json" not in store.list() and len(calls) > 1
    code, out, _ = program(*flags)
    assert code == 0 and "This run is complete" in out
    assert {"result.json", "checkpoints/ckpt-10.whole"} <= store.list().keys()


@pytest.mark.slow
def test_run_that_another_one_takes_over_ends_with_1(program, store, quick, monkeypatch):
    start = upload.Uploader.start

    def start_after_another_run(self):
        store.write("owner/00000002", json.dumps({"pid": 1, "host": "other"}).encode())
        start(self)

    monkeypatch.setattr(upload.Uploader, "start", start_after_another_run)
    code, _, error = program(f"--workdir={store.url}", "--config.train.steps=100000")
    assert code == 1 and f"{store.url} was taken over by another run" in error
    assert "checkpoints/ckpt-100000.whole" not in store.list()


def test_second_run_is_rejected_with_2(program, store, quick):
    owner = ownership.Ownership(store)
    owner.acquire()
    code, _, error = program(f"--workdir={store.url}", "--config.train.steps=10")
    owner.end(released=True)
    assert code == 2 and f"{store.url} is in use by another run, pid {os.getpid()}" in error
    assert store.list().keys() == {"owner/00000001"}


@pytest.mark.slow
def test_other_modes_and_commands_read_a_url_and_send_their_results(
    program, store, in_step, capsys
):
    tf_keras.backend.reset_uids()
    train(program, store.url, 20, *BEST)
    url = store.url
    before = json.loads(store.read("result.json"))
    best = before["best"]["step"]
    code, _, error = program("--mode=eval", f"--workdir={url}", "--checkpoint=10")
    assert code == 0, error
    after = json.loads(store.read("result.json"))
    assert after["checkpoint"]["step"] == 10 and after["eval"] == before["eval"]
    code, out, error = program(
        "--mode=export", f"--workdir={url}", f"--checkpoint={url}/best/ckpt-{best}"
    )
    assert code == 0, error
    assert f"export/{best}/saved_model.pb" in store.list()
    code, _, error = program("--mode=continuous_eval", f"--workdir={url}")
    assert code == 0, error
    assert ctl.load(url, config="experiment.py").step == 20
    assert ctl.load(url, trust_code=True).step == 20
    tf_keras.backend.reset_uids()
    init = f"--config.init.checkpoint={url}"
    code, _, error = program(init, "--config.train.steps=5", "--workdir=other")
    assert code == 0, error
    started = json.loads(pathlib.Path("other/events.jsonl").read_text().splitlines()[0])
    assert started["weights_from"].endswith("ckpt-20")
    code = main.run(["ctl", "diff", url, url])
    out = capsys.readouterr().out
    assert code == 0 and "weights     the same bits at step 10, at step 20" in out
    assert main.run(["ctl", "report", url]) == 0
    assert pathlib.Path("report.html").exists()


@pytest.mark.parametrize("name", ["../../stolen", "/{folder}/stolen", "config.json", "a\\b"])
def test_only_files_of_a_checkpoint_are_fetched(store, tmp_path, monkeypatch, name):
    name = name.format(folder=tmp_path)
    store.write("checkpoints/ckpt-5.whole", json.dumps({"files": {name: 4}}).encode())
    # As of a store that anyone has written: it lists the name as it is.
    monkeypatch.setattr(type(store), "list", lambda *_: {"ckpt-5.whole": 9, name: 4})
    monkeypatch.setattr(type(store), "download", lambda *_: pytest.fail("fetched"))
    local = LocalCopy(store.url, tmp_path / "copy")
    assert fetch.checkpoint(local, "checkpoints", 5) == (
        f"its marker names {name!r}, which is no file of a checkpoint"
    )


def test_no_code_that_a_run_in_a_store_names_is_imported(program, store, tmp_path):
    experiments.write(tmp_path, {"evil.py": "Trainer = exit('evil.py was imported')"})
    config = keys.defaults().to_dict() | {"trainer": f"{tmp_path}/evil.py:Trainer"}
    config |= {"model": {"dropout": 0.5}, "data": config["data"] | {"global_batch_size": 8}}
    store.write("config.json", json.dumps(config).encode())
    store.write("checkpoints/ckpt-5.index", b"data")
    store.write("checkpoints/ckpt-5.whole", json.dumps({"files": {"ckpt-5.index": 4}}).encode())
    for mode in ("train_and_eval", "eval", "export"):
        code, _, error = program(f"--mode={mode}", f"--workdir={store.url}")
        assert code == 2 and "holds a run of another experiment, trainer" in error
    assert main.run(["ctl", "diff", store.url, store.url]) == 2  # the files are no checkpoint
    assert main.run(["ctl", "report", store.url]) == 0
    with pytest.raises(ctl.UsageError, match=r"evil.py:Trainer.*pass"):
        ctl.load(store.url)
    with pytest.raises(ctl.UsageError, match=r"ckpt-5 cannot be read"):
        ctl.load(store.url, config="experiment.py")
    with pytest.raises(ctl.UsageError, match=r"evil.py was imported"):
        ctl.load(store.url, trust_code=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fresh"], "--fresh does not move objects: name another --workdir than URL"),
        (["--mode=aot_compile"], "The --workdir of --mode=aot_compile is URL, but"),
        (["--dry_run"], "The --workdir of a sweep or a dry run is URL, but ctl"),
        (["--mode=eval"], "holds no run: train first"),
        (["--config.train.local_dir=gs://x"], "train.local_dir is gs://x, but ctl does not"),
        (["--config.init.checkpoint=memory://none"], "memory://none has no run"),
        (["--config.train.local_dir=full"], "full is the local folder of URL, but has"),
    ],
)
def test_what_a_url_cannot_do_is_one_line(program, url, tmp_path, flags, message):
    experiments.write(tmp_path, {"full/file": "x"})
    code, _, error = program(f"--workdir={url}", *flags)
    assert code == 2 and error.count("\n") == 1
    assert message in error.replace(url, "URL")


def test_names_of_local_folders_differ_by_url_and_end_like_it():
    one, other = folder_of("gs://bucket/a/run", "train"), folder_of("gs://bucket/a-run", "train")
    assert one.parent != other.parent and one.name == "run"
    local = types.SimpleNamespace(local_dir="x")
    worker = bucket.Bucket("memory://b/run", local, task="worker-1")
    assert worker.folder == pathlib.Path("x.worker-1")


def test_worker_that_reads_another_store_is_rejected_before_training(store):
    processes = OtherProcesses(of_chief=5)
    processes.is_chief = False
    worker = bucket.Bucket(store.url, keys.defaults().train, task="worker-1")
    opened = worker.all_open(processes, on_lost=print, on_durable=print, print_line=print)
    with pytest.raises(ctl.UsageError, match="not the same store in every process"), opened:
        raise AssertionError("training began")


def test_error_at_the_start_is_reported_and_the_run_is_released(program, store, quick, monkeypatch):
    def fail(*_, **__):
        raise ctl.UsageError("no")

    monkeypatch.setattr(fetch, "run", fail)
    code, _, error = program(f"--workdir={store.url}")
    assert (code, error) == (2, "ctl: no\n")
    assert json.loads(store.read("owner/00000001"))["released"]
