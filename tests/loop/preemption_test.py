"""A cloud's notice requests a stop."""

import io
import json
import pathlib
import time
import types

import pytest

from ctl.errors import UsageError
from ctl.loop import preemption as module
from ctl.loop.preemption import GceNotice
from ctl.loop.stop import StopRequest


@pytest.fixture
def metadata(monkeypatch):
    """The answers of a metadata server, which the test changes, and the names that were read."""
    answers, reads = {"preempted": "FALSE", "maintenance-event": "NONE"}, []

    def open_url(request, timeout):
        folder, _, name = request.full_url.rpartition("/")
        assert folder == "http://metadata.google.internal/computeMetadata/v1/instance"
        assert request.get_header("Metadata-flavor") == "Google" and timeout
        reads.append(name)
        if answers[name] is None:
            raise OSError("404")
        return io.BytesIO(answers[name].encode())

    monkeypatch.setattr("urllib.request.urlopen", open_url)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    return answers, reads


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("before", "name", "value"),
    [
        ({}, "preempted", "TRUE"),
        ({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, "maintenance-event",
         "TERMINATE_ON_HOST_MAINTENANCE"),
        ({"preempted": None}, "preempted", "TRUE"),  # the server answers 404 for a moment
    ],
)  # fmt: skip
def test_notice_requests_a_stop(metadata, before, name, value):
    (answers, reads), stop = metadata, StopRequest()
    notice = GceNotice()
    notice.begin(types.SimpleNamespace(stop=stop))
    with notice.around_training():
        answers.update(before)
        count = len(reads) + 6  # at least two complete readings
        wait_for(lambda: len(reads) >= count)
        assert not stop.requested
        answers[name] = value
        wait_for(lambda: stop.requested)
        assert stop.reasons == {"notice": f"{name}: {value}"}


def test_missing_server_is_rejected(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "localhost:1")
    with pytest.raises(UsageError, match="no metadata server answers at localhost:1"):
        GceNotice().around_training().__enter__()


def test_run_saves_and_exits_with_75(metadata, program):
    metadata[0]["preempted"] = "TRUE"
    code, out, _ = program("--config.train.preemption_notice=gce")
    assert code == 75
    assert "preempted: TRUE: saving, then stopping." in out and "Stopped at step 5" in out
    folder = pathlib.Path("runs/experiment")
    events = list(map(json.loads, (folder / "events.jsonl").read_text().splitlines()))
    assert events[-1]["event"] == "stop" and events[-1]["notice"] == "preempted: TRUE"
    assert (folder / "checkpoints/ckpt-5.whole").exists()
