"""The cluster is read from TF_CONFIG."""

import json
import time

import pytest

from ctl.errors import UsageError
from ctl.hardware import engines
from ctl.hardware.cluster import Cluster

TWO = {"worker": ["a:1", "b:2"]}


def parse(value):
    return engines.from_environment({"TF_CONFIG": value})


def text(addresses=TWO, role="worker", index=1):
    return json.dumps({"cluster": addresses, "task": {"type": role, "index": index}})


def test_a_worker_is_identified_by_its_task():
    worker = parse(text())
    assert worker == Cluster(TWO, "worker", 1) == parse(worker.tf_config())
    assert json.loads(worker.tf_config()) == json.loads(text())
    assert (worker.address, worker.name) == ("b:2", "worker 1")
    assert (worker.size, worker.is_chief, worker.has_servers) == (2, False, False)
    assert worker.others() == {"worker 0": "a:1"}
    assert parse(text(index=0)).is_chief


def test_the_task_named_chief_is_the_chief():
    spec = {"chief": ["c:9"], "worker": ["a:1"], "ps": ["p:3"]}
    clusters = [parse(text(spec, role, 0)) for role in spec]
    assert [each.is_chief for each in clusters] == [True, False, False]
    assert [each.name for each in clusters] == ["chief", "worker 0", "ps 0"]
    assert all(each.has_servers for each in clusters)


NO_CLUSTER = '{"cluster": {}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize("value", ["", " ", "{}", NO_CLUSTER])
def test_without_a_cluster_the_run_has_one_process(value):
    assert parse(value) is None
    assert engines.from_environment({}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{cluster", r"TF_CONFIG is not JSON \(.*: fix it, or start.*ctl launch"),
        ("[1]", "must be a JSON object whose 'cluster'"),
        ('{"cluster": [1]}', "must be a JSON object whose 'cluster'"),
        (json.dumps({"cluster": TWO}), "must identify this process by a 'task'"),
        (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "must identify this process"),
        (text(role="chief", index=0), "has the task type 'chief', but the cluster has only worker"),
        (text(index=2), "has the task index 2, but the indices of 'worker' are 0 to 1"),
        (text(index=-1), "has the task index -1"),
        (text(index=True), "has the task index True"),
        (text({"worker": ["a:1"], "ps": ["a:1"]}), "assigns a:1 to more than one task"),
        (text({"worker": "a:1"}), "must list the tasks of 'worker' as strings host:port"),
        (text({"worker": [["a:1"]]}), "must list the tasks of 'worker' as strings host:port"),
        (text({"worker": {"0": "a:1", "2": "b:1"}}), "lists the tasks 0, 2 of 'worker', but"),
        (text({"worker": {"one": "a:1"}}), "has the task index 'one'"),
        (text({"master": ["a:1"], "chief": ["b:1"]}), "has both 'chief' and 'master'"),
        ('{"sparseCluster": {"worker": {"0": "a-worker-0.n.svc:1"}}}', "set CTL_WORKERS to their"),
        ('{"sparseCluster": [1]}', "has a 'sparseCluster', which does not list all workers"),
        (text({"worker": ["a"]}), "has the address 'a' for 'worker', which is not host:port"),
        (text({"worker": ["a:99999"]}), "has the address 'a:99999' for 'worker'"),
        (text({"workers": ["a:1"]}), r"has the unknown role 'workers' \(known: chief, worker, ps"),
        (text({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}), "has more than one evaluator"),
        (text(role="evaluator", index=1), "has the task index 1, but a run has one evaluator"),
        (text({"worker": ["a:1", "b:1"], "chief": ["c:1", "d:1"]}), "more than one chief"),
        (text({"worker": ["a:1"], "ps": ["c:1"]}), "has parameter servers, which require"),
        # These only look valid.
        (text(role=["worker"]), r"has the task type \['worker'\]"),
        (text(index="²"), "has the task index '²'"),
        (text(index="9" * 5000), "which is not a whole number"),
        (text({"worker": ["a:٣", "b:2"]}), "has the address 'a:٣' for 'worker'"),
        (text({"worker": ["a\0b:1", "b:2"]}), "which is not host:port"),
        ("[" * 99_999, "is not JSON"),
    ],
)
def test_invalid_tf_config_is_rejected_in_one_line(value, message):
    with pytest.raises(UsageError, match=message) as error:
        engines.from_environment({"TF_CONFIG": value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("listed", [True, False])
def test_the_evaluator_is_a_process_of_its_own(listed):
    tasks = {**TWO, "evaluator": ["e:1"]} if listed else TWO
    assert parse(text(tasks, role="evaluator", index=0)) is None
    assert parse(text(tasks, role="worker", index=1)) == Cluster(TWO, "worker", 1)


def test_a_cluster_of_thousands_of_tasks_is_validated_quickly():
    start = time.process_time()
    large = parse(text({"worker": [f"host-{i}:1" for i in range(50_000)]}))
    assert large.size == 50_000
    assert time.process_time() - start < 10


def test_tensorflows_sparse_form_lists_all_tasks():
    sparse = {"worker": {"1": "b:2", "0": "a:1"}, "ps": []}
    assert parse(text(sparse)) == Cluster(TWO, "worker", 1)


def test_master_is_the_chief():
    spec = {"master": ["c:1"], "worker": ["a:1", "b:1"]}
    master = parse(text(spec, "master", 0))
    assert (master.name, master.is_chief, master.num_workers) == ("chief", True, 3)
    assert not parse(text(spec)).is_chief


def test_dynamic_workers_of_kubeflow_get_the_others_from_their_number():
    own = {"worker": {"1": "mnist-worker-1.default.svc:2222"}, "ps": []}
    config = {"sparseCluster": own, "task": {"type": "worker", "index": 1}}
    variables = {"TF_CONFIG": json.dumps(config), "CTL_WORKERS": "3"}
    worker = engines.from_environment(variables)
    assert worker.addresses["worker"][2] == "mnist-worker-2.default.svc:2222"
    assert (worker.size, worker.name) == (3, "worker 1")
