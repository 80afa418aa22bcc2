"""The notice of a cloud that it is about to stop this machine."""

import http.server
import json
import pathlib
import threading
import time

import pytest

from ctl import main
from ctl.errors import UsageError
from ctl.loop.preemption import GceNotice
from ctl.loop.stop import StopRequest

QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}


@pytest.fixture
def metadata(monkeypatch):
    """The answers of a metadata server, which the test changes."""
    answers = dict(QUIET)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers["Metadata-Flavor"] == "Google"
            name = self.path.removeprefix("/computeMetadata/v1/instance/")
            self.send_response(200 if known and name in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(name, "").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"localhost:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield answers
        server.shutdown()
        thread.join()


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(
    ("name", "value"),
    [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_notice_requests_a_stop(metadata, name, value):
    stop = StopRequest()
    with GceNotice(stop, interval=0.05):
        assert not within(0.3, lambda: stop.requested)
        metadata[name] = value
        assert within(10, lambda: stop.requested)
        assert stop.reasons == {"notice": f"{name}: {value}"}


def test_migration_requests_no_stop(metadata):
    metadata["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    stop = StopRequest()
    with GceNotice(stop, interval=0.05):
        assert not within(0.3, lambda: stop.requested)


def test_server_that_is_unavailable_for_a_moment_is_read_again(metadata):
    stop = StopRequest()
    with GceNotice(stop, interval=0.05):
        del metadata["preempted"]  # now it answers 404
        assert not within(0.3, lambda: stop.requested)
        metadata["preempted"] = "TRUE"
        assert within(10, lambda: stop.requested)


def test_missing_server_is_rejected(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "localhost:1")
    with pytest.raises(UsageError, match="no metadata server answers at localhost:1"):
        GceNotice(StopRequest()).__enter__()


def test_run_saves_and_exits_with_75(metadata, tmp_path, monkeypatch, capsys):
    metadata["preempted"] = "TRUE"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_experiment.py").write_text(
        "import ctl\nfrom tests import reference_model\n"
        "def get_config():\n"
        "    return ctl.config(trainer='tests.reference_model:ReferenceTrainer',\n"
        "                      data=dict(global_batch_size=8),\n"
        "                      train=dict(steps=1000, steps_per_loop=10))\n"
    )
    arguments = ["ctl", "--config=tiny_experiment.py", "--workdir=mine"]
    assert main.run([*arguments, "--config.train.preemption_notice=gce"]) == 75
    out = capsys.readouterr().out
    assert "preempted: TRUE: saving, then stopping." in out and "Stopped at step 10" in out
    events = list(map(json.loads, pathlib.Path("mine/events.jsonl").read_text().splitlines()))
    assert events[-1]["event"] == "stop" and events[-1]["notice"] == "preempted: TRUE"
    assert pathlib.Path("mine/checkpoints/ckpt-10.whole").exists()
