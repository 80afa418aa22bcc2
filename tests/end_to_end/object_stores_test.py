"""Runs whose --workdir is in S3 or Google Cloud Storage, spoken to over HTTP by real servers.

A proxy adds the failures, and checks the precondition that gcp-storage-emulator ignores.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import time

import pytest

from ctl import main
from ctl.loop.bucket import fetch
from ctl.loop.bucket.local import folder_of
from ctl.loop.bucket.store import open_folder
from tests.support import child, experiments
from tests.support.faults import signals
from tests.support.object_stores import servers
from tests.support.object_stores.proxy import Proxy

pytest.importorskip("moto", reason="moto is not installed: BUILD.md says how")
pytestmark = pytest.mark.slow
LONG = pytest.mark.long
S3 = pytest.mark.parametrize("proxy", ["s3"], indirect=True)
# A run waits at the step that is in the file `wait`, so that it is still there when it is killed.
EXPERIMENT = (
    experiments.DROPOUT
    + """
import pathlib
import time

WAIT = pathlib.Path(__file__).with_name("wait")


class Wait(ctl.Action):
    at = "train"
    everywhere = True
    may_stop = False

    def __call__(self, outputs):
        while WAIT.exists() and self.controller.step >= int(WAIT.read_text()):
            time.sleep(0.05)
"""
)
WAITS = "--config.actions=['experiment.py:Wait']"


@pytest.fixture(scope="module")
def proxy(request):
    """A proxy in front of a server of the kind "s3" or "gcs", which this process also uses."""
    with servers.start(request.param) as server, Proxy(server.port) as proxy:
        variables = server.environment(proxy.port)
        proxy.url, proxy.variables = server.url, variables
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield proxy


@pytest.fixture
def start(proxy, tmp_path, monkeypatch):
    """Starts the program on experiment.py; `cache` is where it keeps its local folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    experiments.write(tmp_path, {"experiment.py": EXPERIMENT})
    proxy.fault, proxy.bytes_per_second = None, 0
    variables = {**proxy.variables, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = []

    def start(*arguments, module="ctl.main", **more):
        command = ["-m", module, *arguments]
        started.append(child.start(command, cwd=tmp_path, **{**variables, **more}))
        return started[-1]

    start.cache = tmp_path / "cache"
    yield start
    for process in started:
        if process.poll() is None:  # the test has failed
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def finish(process):
    out, error = process.communicate(timeout=240)
    return process.returncode, out, error


def wait(process, condition):
    """Waits for a state of a run that must go on."""
    while not condition():
        assert process.poll() is None, finish(process)
        time.sleep(0.05)


def last_step(store):
    """The step of the newest checkpoint in the store."""
    return max(fetch.steps(store.list()), default=0)


def weights(url, step):
    return experiments.read_weights(pathlib.Path(fetch.path(url, str(step))), step)


def check_durable(store):
    """Asserts that each checkpoint whose marker is in the store has all its files; returns the last."""
    names = store.list()
    steps = fetch.steps(names)
    for step in steps:
        files = json.loads(store.read(f"checkpoints/ckpt-{step}.whole"))["files"]
        files = {f"checkpoints/{name}": size for name, size in files.items()}
        assert files.items() <= names.items(), step
    return max(steps, default=0)


EVERY = 100  # steps from one checkpoint to the next


@S3
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=LONG)])
def test_kills_with_the_local_folder_deleted_leave_the_bits_of_an_undisturbed_run(
    proxy, start, kills, tmp_path
):
    whole, killed = f"{proxy.url}/whole-{kills}", f"{proxy.url}/killed-{kills}"
    steps = 500 * kills
    run = ("--config=experiment.py", f"--config.train.steps={steps}", "--config.eval.interval=0")
    run += (f"--config.train.checkpoint_interval={EVERY}",)
    code, _, error = finish(start(*run, f"--workdir={whole}"))
    assert code == 0, error
    store, draw, last = open_folder(killed), random.Random(0), 0
    (tmp_path / "wait").write_text(str(steps - EVERY))
    for kill in range(kills):
        process = start(*run, WAITS, f"--workdir={killed}")
        # While it starts, trains, saves or uploads.
        target = draw.choice([0, (kill + 1) * steps // 2 // kills])
        wait(process, lambda target=target: last_step(store) >= target)
        time.sleep(draw.uniform(0.0, 1.0 if target else 8.0))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
        now = check_durable(store)
        assert now >= last  # nothing that was durable is missing
        last = now
        print(f"kill {kill + 1}: {last} of {steps} steps are durable")
        shutil.rmtree(start.cache, ignore_errors=True)
    assert 0 < last < steps
    (tmp_path / "wait").unlink()
    code, out, error = finish(start(*run, f"--workdir={killed}"))
    assert code == 0 and f"ckpt-{last}." in out, error
    experiments.check_same(weights(killed, steps), weights(whole, steps))


@pytest.mark.parametrize(
    ("proxy", "fault"),
    [
        ("s3", 503),
        ("s3", "cut"),
        ("gcs", 503),
        *[pytest.param(kind, 401, marks=LONG) for kind in ("s3", "gcs")],
        pytest.param("gcs", "cut", marks=LONG),
    ],
    indirect=["proxy"],
)
def test_failures_of_the_store_delay_the_upload_and_not_the_training(proxy, start, fault):
    url = f"{proxy.url}/fault-{fault}"
    draw = random.Random(fault)

    def fail(method, path, headers):
        writes = method in ("PUT", "POST") and "owner" not in path
        return fault if writes and draw.random() < 0.3 else None

    begin = time.monotonic()
    process = start("--config=experiment.py", "--config.train.steps=200", f"--workdir={url}")
    store = open_folder(url)
    wait(process, lambda: store.list("owner"))
    proxy.fault = fail
    code, out, error = finish(process)
    proxy.fault = None
    assert code == 0, error
    assert check_durable(store) == 200
    minutes = (time.monotonic() - begin) / 60
    assert out.count("cannot be written") <= 1 + minutes  # one line a minute


class Events:
    """The steps of the events of a run, from its local folder.

    Attributes:
        saved: the steps of the checkpoints, in the order of events.jsonl.
        durable: the steps of those that were in the store.
        newest: for each durable one, the newest that was complete when its upload began, at least.
    """

    def __init__(self, url):
        path = folder_of(url, "train") / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.saved, self.durable, self.newest, newest = [], [], [], 0
        for event in map(json.loads, lines):
            if event["event"] == "checkpoint":
                self.saved.append(event["step"])
            if event["event"] == "durable":
                self.durable.append(event["step"])
                self.newest.append(newest)
                # The event of a checkpoint comes before a thread has written it.
                newest = self.saved[-2] if len(self.saved) > 1 else 0


def resident_mib(process):
    fields = pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# A checkpoint of 19 MB; one is saved every five steps.
LARGE = experiments.DROPOUT.replace("layers.Dense(8)", "layers.Dense(200_000)")
ENDLESS = ("--config=experiment.py", "--config.train.steps=100000000", "--config.eval.interval=0")


@S3
def test_slow_store_gets_the_newest_checkpoints_in_order_while_training_goes_on(
    proxy, start, tmp_path
):
    url = f"{proxy.url}/slow"
    experiments.write(tmp_path, {"experiment.py": LARGE})
    # Those that are kept in the local folder must not become a queue.
    keep = "--config.train.checkpoints_to_keep=20"
    run = (*ENDLESS, keep, "--config.train.checkpoint_interval=5", f"--workdir={url}")
    proxy.bytes_per_second = 8_000_000
    process = start(*run)
    wait(process, lambda: Events(url).durable)
    before = resident_mib(process)
    wait(process, lambda: len(Events(url).durable) >= 5)
    grown = resident_mib(process) - before
    os.killpg(process.pid, signal.SIGTERM)
    code, out, error = finish(process)
    assert code == 75, error
    events = Events(url)
    assert f"Stopped at step {events.saved[-1]}, saved in {url}" in out
    assert len(events.saved) > 2 * len(events.durable)  # the store was slower than the run
    assert events.durable == sorted(set(events.durable))
    assert all(step >= newest for step, newest in zip(events.durable, events.newest, strict=True))
    assert grown < 19 * (len(events.saved) - len(events.durable)) / 2  # no queue of checkpoints
    assert check_durable(open_folder(url)) == events.durable[-1] == events.saved[-1]

    # The store hangs: the run says that the last checkpoint is not durable.
    process = start(*run, "--config.train.upload_grace=3")
    saved = len(events.saved)
    wait(process, lambda: len(Events(url).saved) > saved)
    proxy.bytes_per_second = 1
    wait(process, lambda: len(Events(url).saved) > saved + 5)
    os.killpg(process.pid, signal.SIGTERM)
    code, _, error = finish(process)
    assert code == 1 and f"{url} is not complete after 3 s (the upload takes longer)" in error
    later = Events(url)
    assert check_durable(open_folder(url)) == later.durable[-1] < later.saved[-1]


@S3
def test_credentials_that_expire_are_read_again_while_training_goes_on(proxy, start, tmp_path):
    url, file = f"{proxy.url}/expired", tmp_path / "credentials"

    def write_key(name):
        file.write_text(f"[default]\naws_access_key_id={name}\naws_secret_access_key=secret\n")

    write_key("FIRST")
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    run = (*ENDLESS, "--config.train.checkpoint_interval=500", f"--workdir={url}")
    process = start(*run, **keys, AWS_SHARED_CREDENTIALS_FILE=str(file))
    wait(process, lambda: Events(url).durable)
    rejected, accepted = [], []

    def fail(method, path, headers):
        is_expired = "Credential=FIRST/" in headers["authorization"]
        (rejected if is_expired else accepted).append(path)
        return 403 if is_expired else None

    proxy.fault = fail
    wait(process, lambda: len(rejected) >= 3)
    expired = Events(url)
    wait(process, lambda: len(Events(url).saved) >= len(expired.saved) + 3)
    assert Events(url).durable == expired.durable and not accepted
    write_key("SECOND")
    wait(process, lambda: Events(url).durable > expired.durable)
    assert accepted
    os.killpg(process.pid, signal.SIGTERM)
    code, out, error = finish(process)
    assert code == 75 and "cannot be written (PermissionError" in out, out + error
    events = Events(url)
    assert events.durable[-1] == events.saved[-1]


@S3
def test_two_workers_without_a_shared_disk_resume_from_the_store(proxy, start, tmp_path):
    url = f"{proxy.url}/two-killed"
    run = (f"--config={tmp_path / 'experiment.py'}", "--config.train.steps=40")
    best = "--config.train.best.metric=eval/loss", "--config.train.best.mode=min"
    run += (*best, "--config.train.best.restore=true")
    (tmp_path / "wait").write_text("20")
    launch = ("--workers=2", "--", *run, f"--workdir={url}")
    process = start(*launch, WAITS, module="ctl.launch")
    store = open_folder(url)
    wait(process, lambda: last_step(store) >= 10)
    for pid in (process.pid, *signals.workers(process.pid).values()):
        os.kill(pid, signal.SIGKILL)
    finish(process)
    (tmp_path / "wait").unlink()
    shutil.rmtree(start.cache)
    code, out, error = finish(start(*launch, module="ctl.launch"))
    assert code == 0, out + error
    assert (folder_of(url, "worker-1") / "checkpoints/ckpt-40.whole").exists()
    replicas = ("--config.runtime.strategy=mirrored", "--config.runtime.logical_devices=2")
    assert main.run(["ctl", *run, *replicas, f"--workdir={tmp_path / 'whole'}"]) == 0
    experiments.check_same(weights(url, 40), experiments.read_weights(tmp_path / "whole", 40))
