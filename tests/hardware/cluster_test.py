"""The cluster is read from TF_CONFIG or from the variables of an Indexed Job."""

import json
import time

import pytest

from ctl.errors import UsageError
from ctl.hardware import cluster
from ctl.hardware.cluster import Cluster

TWO = {"worker": ["a:1", "b:2"]}


def text(addresses=TWO, role="worker", index=1):
    return json.dumps({"cluster": addresses, "task": {"type": role, "index": index}})


def test_a_worker_is_identified_by_its_task():
    worker = cluster.from_environment({"TF_CONFIG": text()})
    assert (worker.role, worker.index) == ("worker", 1)
    assert (worker.address, worker.name) == ("b:2", "worker 1")
    assert (worker.size, worker.is_chief, worker.has_servers) == (2, False, False)
    assert worker.others() == {"worker 0": "a:1"}
    assert cluster.from_tf_config(text(index=0)).is_chief


def test_the_task_named_chief_is_the_chief():
    spec = {"chief": ["c:9"], "worker": ["a:1"], "ps": ["p:3"]}
    clusters = [cluster.from_tf_config(text(spec, role, 0)) for role in spec]
    assert [each.is_chief for each in clusters] == [True, False, False]
    assert [each.name for each in clusters] == ["chief", "worker 0", "ps 0"]
    assert all(each.has_servers for each in clusters)


def test_members_are_the_processes_that_train_in_the_order_of_their_replicas():
    addresses = {"worker": ["a:1", "[::1]:2"], "ps": ["p:3"], "chief": ["c:4"]}
    members = cluster.Cluster(addresses, "worker", 0).members()
    assert members == [("chief", "c"), ("worker 0", "a"), ("worker 1", "[::1]")]


def test_tf_config_describes_the_same_cluster_again():
    worker = cluster.from_tf_config(text())
    assert json.loads(worker.tf_config()) == json.loads(text())
    assert cluster.from_tf_config(worker.tf_config()) == worker


@pytest.mark.parametrize("environment", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " "}])
def test_without_variables_the_run_has_one_process(environment):
    assert cluster.from_environment(environment) is None


def test_tf_config_without_a_cluster_is_a_run_of_one_process():
    assert cluster.from_tf_config("{}") is None
    assert cluster.from_tf_config('{"cluster": {}, "task": {"type": "worker", "index": 0}}') is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{cluster", r"TF_CONFIG is not JSON \(.*: fix it, or start.*ctl\.launch"),
        ("[1]", "must be a JSON object whose 'cluster' is an object"),
        ('{"cluster": [1]}', "must be a JSON object whose 'cluster' is an object"),
        (json.dumps({"cluster": TWO}), "must identify this process by a 'task'"),
        (
            json.dumps({"cluster": TWO, "task": {"type": "worker"}}),
            "must identify this process by a 'task'",
        ),
        (text(role="chief", index=0), "has the task type 'chief', but the cluster has only worker"),
        (text(index=2), "has the task index 2, but the indices of 'worker' are 0 to 1"),
        (text(index=-1), "has the task index -1"),
        (text(index="one"), "has the task index 'one', which is not a whole"),
        (text(index=True), "has the task index True"),
        (text({"worker": ["a:1", "a:1"]}), "assigns a:1 to more than one task"),
        (text({"worker": ["a:1"], "ps": ["a:1"]}), "assigns a:1 to more than one task"),
        (text({"worker": "a:1"}), "must list the tasks of 'worker' as strings host:port"),
        (text({"worker": [["a:1"]]}), "must list the tasks of 'worker' as strings host:port"),
        (
            text({"worker": {"0": "a:1"}}),
            "lists the tasks of 'worker' as an object, not as an array",
        ),
        (text({"worker": ["a"]}), "has the address 'a' for 'worker', which is not host:port"),
        (text({"worker": ["a:99999"]}), "has the address 'a:99999' for 'worker'"),
        (text({"worker": ["http://a:1"]}), "which is not host:port"),
        (text({"workers": ["a:1"]}), r"has the unknown role 'workers' \(known: chief, worker, ps"),
        (text({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}), "has more than one evaluator"),
        (text(role="evaluator", index=1), "has the task index 1, but a run has one evaluator"),
        (text({"worker": ["a:1", "b:1"], "chief": ["c:1", "d:1"]}), "more than one chief"),
        (
            text({"worker": ["a:1", "b:1"], "ps": ["c:1"]}),
            "has parameter servers, which require a chief and workers",
        ),
        # These only look valid.
        (text(role=["worker"]), r"has the task type \['worker'\]"),
        (text(role={}), "has the task type {}"),
        (text(index="²"), "has the task index '²'"),
        (text(index="--1"), "has the task index '--1'"),
        (text(index="9" * 5000), "which is not a whole number"),
        (text({"worker": ["a:٣", "b:2"]}), "has the address 'a:٣' for 'worker'"),
        (text({"worker": ["a..b:1", "b:2"]}), "has the address 'a..b:1' for 'worker'"),
        (text({"worker": ["a" * 64 + ":1", "b:2"]}), "which is not host:port"),
        (text({"worker": ["a\0b:1", "b:2"]}), "which is not host:port"),
        ("[" * 99_999, "is not JSON"),
    ],
)
def test_invalid_tf_config_is_rejected_in_one_line(value, message):
    with pytest.raises(UsageError, match=message) as error:
        cluster.from_environment({"TF_CONFIG": value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("listed", [True, False])
def test_the_evaluator_is_a_process_of_its_own(listed):
    tasks = {**TWO, "evaluator": ["e:1"]} if listed else TWO
    environment = {"TF_CONFIG": text(tasks, role="evaluator", index=0)}
    assert cluster.from_environment(environment) is None
    worker = {"TF_CONFIG": text(tasks, role="worker", index=1)}
    assert cluster.from_environment(worker) == Cluster(TWO, "worker", 1)


JOB = {"CTL_JOB": "mnist", "CTL_SERVICE": "ctl", "CTL_WORKERS": "2", "JOB_COMPLETION_INDEX": "1"}


def test_pods_of_an_indexed_job_are_identified_by_their_index():
    worker = cluster.from_environment(JOB)
    assert worker == Cluster({"worker": ["mnist-0.ctl:2222", "mnist-1.ctl:2222"]}, "worker", 1)
    with_servers = {**JOB, "CTL_PS": "1", "CTL_PORT": "99"}
    clusters = [
        cluster.from_environment({**with_servers, "JOB_COMPLETION_INDEX": str(i)}) for i in range(4)
    ]
    assert [each.name for each in clusters] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert clusters[3].address == "mnist-3.ctl:99"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"CTL_WORKERS": "two"},
            "CTL_WORKERS is 'two', but must be a whole number from 1 to 100000",
        ),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is ''"),
        ({"CTL_SERVICE": ""}, "CTL_WORKERS is set but CTL_SERVICE is not"),
        ({"JOB_COMPLETION_INDEX": "2"}, "define 2 processes: set the Job's completions to 2"),
        ({"CTL_PORT": "tcp://10.0.0.1"}, "CTL_PORT is 'tcp://10.0.0.1'"),
        ({"CTL_PORT": "65536"}, "CTL_PORT is '65536', but must be a whole number from 1 to 65535"),
        ({"CTL_PORT": "٣"}, "CTL_PORT is '٣'"),
        ({"CTL_WORKERS": "²"}, "CTL_WORKERS is '²'"),
        ({"CTL_WORKERS": "999999999"}, "CTL_WORKERS is '999999999'"),
        ({"CTL_WORKERS": "9" * 5000}, "CTL_WORKERS is '9999"),
        (
            {"CTL_JOB": "a b"},
            "CTL_JOB is 'a b' and CTL_SERVICE is 'ctl', which do not form a valid host name",
        ),
        ({"CTL_SERVICE": "a..b"}, "which do not form a valid host name"),
    ],
)
def test_invalid_variables_of_an_indexed_job_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        cluster.from_environment({**JOB, **changes})


def test_local_processes_have_one_port_each():
    ports = [11, 12, 13, 14]
    clusters = cluster.make_local_clusters(workers=2, servers=1, ports=ports)
    assert [each.name for each in clusters] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert [int(each.address.rsplit(":")[-1]) for each in clusters] == ports
    assert all(cluster.from_tf_config(each.tf_config()) == each for each in clusters)


def test_a_cluster_of_thousands_of_tasks_is_validated_quickly():
    start = time.process_time()
    large = cluster.from_tf_config(text({"worker": [f"host-{i}:1" for i in range(50_000)]}))
    assert large.size == 50_000
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("roles", "workers"),
    [(["worker"] * 3, 3), (["chief", "worker"], 2), (["chief", "worker", "ps"], 1)],
)
def test_workers_are_the_processes_that_compute_gradients(roles, workers):
    addresses = {role: [f"{role}-{i}:1" for i in range(roles.count(role))] for role in roles}
    assert Cluster(addresses, roles[0], 0).num_workers == workers
