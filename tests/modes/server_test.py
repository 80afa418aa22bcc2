"""A worker or parameter server serves its chief, and returns whether it must be started again."""

import json
import pathlib
import types

import pytest
import tensorflow as tf

from ctl.hardware import cluster, rendezvous
from ctl.modes import DONE, STOPPED, server
from tests.support import experiments

SERVED = cluster.make_local_clusters(workers=1, servers=1, ports=[11, 12, 13])[1]


@pytest.fixture
def run(make_arguments, monkeypatch):
    """Serves a chief that leaves some events behind; returns the exit code, and what was called."""

    def run(events, **fields):
        # One short interruption, which must not end the server, and then the end of the chief.
        answers = iter([True, *[False] * 9, True, *[False] * 10])
        calls = []

        def start_server(spec, **options):
            calls.append((spec.as_dict(), options["job_name"], options["task_index"]))
            return types.SimpleNamespace(target="grpc://localhost:12")

        def is_listening(address):
            calls.append(address)
            return next(answers)

        def wait(_, timeout):
            calls.append(timeout)

        monkeypatch.setenv("TF_CONFIG", SERVED.tf_config())
        monkeypatch.setattr(rendezvous, "wait_for_others", wait)
        monkeypatch.setattr(rendezvous, "is_listening", is_listening)
        monkeypatch.setattr(tf.distribute, "Server", start_server)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        lines = [json.dumps({"event": event, "step": 5}) + "\n" for event in events]
        experiments.write("run", {"events.jsonl": "".join(lines)})
        keys = {"runtime.cluster.start_timeout": 7.0}
        code = server.run_server(make_arguments(keys, **fields))
        assert next(answers, None) is None
        return code, calls

    return run


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (["start", "stop_requested", "end", "export"], DONE),
        (["start", "checkpoint", "stop"], STOPPED),
        ([], STOPPED),
    ],
)
def test_server_of_a_run_that_has_not_ended_is_started_again(run, capsys, events, code):
    addresses = {role: list(tasks) for role, tasks in SERVED.addresses.items()}
    calls = [7.0, (addresses, "worker", 0), *["localhost:11"] * 21]
    assert run(events) == (code, calls)
    assert capsys.readouterr().out == "worker 0 serves at localhost:12.\n"


def test_dry_run_is_not_started_again(run):
    assert run([], dry_run=True)[0] == DONE
    assert not pathlib.Path("run.dry_run").exists()
