"""A worker of a coordinator serves until its chief has ended."""

import types

import tensorflow as tf

from ctl.hardware import cluster, rendezvous, server


def test_serving_ends_once_the_chief_is_unreachable_for_ten_polls(monkeypatch, capsys):
    worker = cluster.make_local_clusters(workers=1, servers=1, ports=[11, 12, 13])[1]
    # One short interruption, which must not end the server, and then the end of the chief.
    answers = iter([True, *[False] * 9, True, *[False] * 10])
    calls = []

    def start_server(spec, **options):
        calls.append((spec.as_dict(), options["job_name"], options["task_index"]))
        return types.SimpleNamespace(target="grpc://localhost:12")

    def is_listening(address):
        calls.append(address)
        return next(answers)

    monkeypatch.setattr(
        rendezvous, "wait_for_others", lambda *_, timeout, **__: calls.append(timeout)
    )
    monkeypatch.setattr(rendezvous, "is_listening", is_listening)
    monkeypatch.setattr(tf.distribute, "Server", start_server)
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    server.serve(worker, start_timeout=7.0)
    addresses = {role: list(tasks) for role, tasks in worker.addresses.items()}
    assert calls == [7.0, (addresses, "worker", 0), *["localhost:11"] * 21]
    assert next(answers, None) is None
    assert capsys.readouterr().out == "worker 0 serves at localhost:12.\n"
