"""TF_CONFIG: read, checked, built; and waiting for the others."""

import json
import socket
import threading
import time

import pytest

from ctl.errors import Failure, UsageError
from ctl.hardware import cluster
from ctl.hardware.cluster import Cluster

TWO = {"worker": ["a:1", "b:2"]}


def text(addresses=TWO, role="worker", index=1):
    return json.dumps({"cluster": addresses, "task": {"type": role, "index": index}})


def test_a_worker_finds_its_place():
    found = cluster.read({"TF_CONFIG": text()})
    assert (found.role, found.index, found.address, found.name) == ("worker", 1, "b:2", "worker 1")
    assert (found.size, found.is_chief, found.has_servers) == (2, False, False)
    assert found.others() == {"worker 0": "a:1"}
    assert cluster.parse(text(index=0)).is_chief


def test_a_chief_of_its_own_is_the_chief():
    spec = {"chief": ["c:9"], "worker": ["a:1"], "ps": ["p:3"]}
    places = [cluster.parse(text(spec, role, 0)) for role in spec]
    assert [place.is_chief for place in places] == [True, False, False]
    assert [place.name for place in places] == ["chief", "worker 0", "ps 0"]
    assert all(place.has_servers for place in places)


def test_tensorflow_reads_back_what_is_written():
    place = cluster.parse(text())
    assert json.loads(place.tf_config()) == json.loads(text())
    assert cluster.parse(place.tf_config()) == place


@pytest.mark.parametrize("environment", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " "}])
def test_no_description_is_one_process(environment):
    assert cluster.read(environment) is None


def test_a_description_of_no_other_process_is_one_process():
    assert cluster.parse("{}") is None
    assert cluster.parse('{"cluster": {}, "task": {"type": "worker", "index": 0}}') is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{cluster", r"TF_CONFIG is not JSON \(.*mend it, or start.*ctl\.launch"),
        ("[1]", "is not an object with an object 'cluster'"),
        ('{"cluster": [1]}', "is not an object with an object 'cluster'"),
        (json.dumps({"cluster": TWO}), "does not say which task this process is"),
        (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "does not say which task"),
        (text(role="chief", index=0), "is a 'chief', and the cluster has 2 worker"),
        (text(index=2), "is task 2 of 'worker', and there are 2, numbered from 0"),
        (text(index=-1), "is task -1 of 'worker'"),
        (text(index="one"), "has 'one' for the task's index"),
        (text(index=True), "has True for the task's index"),
        (text({"worker": ["a:1", "a:1"]}), "gives a:1 to more than one task"),
        (text({"worker": ["a:1"], "ps": ["a:1"]}), "gives a:1 to more than one task"),
        (text({"worker": "a:1"}), "has no list of host:port for 'worker'"),
        (text({"worker": [["a:1"]]}), "has no list of host:port for 'worker'"),
        (text({"worker": {"0": "a:1"}}), "numbers the tasks of 'worker' by keys"),
        (text({"worker": ["a"]}), "has 'a' for 'worker': want host:port"),
        (text({"worker": ["a:99999"]}), "has 'a:99999' for 'worker'"),
        (text({"worker": ["http://a:1"]}), "want host:port"),
        (text({"workers": ["a:1"]}), "has the role 'workers': want chief, worker, ps"),
        (text({"worker": ["a:1"], "evaluator": ["b:1"]}), "has an evaluator: leave it out"),
        (text({"worker": ["a:1", "b:1"], "chief": ["c:1", "d:1"]}), "more than one chief"),
        (text({"worker": ["a:1", "b:1"], "ps": ["c:1"]}), "needs a chief and workers too"),
    ],
)
def test_a_wrong_description_is_told_in_one_line(given, says):
    with pytest.raises(UsageError, match=says) as refused:
        cluster.read({"TF_CONFIG": given})
    assert "\n" not in str(refused.value)


JOB = {"CTL_JOB": "mnist", "CTL_SERVICE": "ctl", "CTL_WORKERS": "2", "JOB_COMPLETION_INDEX": "1"}


def test_the_pods_of_an_indexed_job_find_their_places():
    found = cluster.read(JOB)
    assert found == Cluster({"worker": ["mnist-0.ctl:2222", "mnist-1.ctl:2222"]}, "worker", 1)
    with_servers = {**JOB, "CTL_PS": "1", "CTL_PORT": "99"}
    places = [cluster.read({**with_servers, "JOB_COMPLETION_INDEX": str(i)}) for i in range(4)]
    assert [place.name for place in places] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert places[3].address == "mnist-3.ctl:99"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"CTL_WORKERS": "two"}, "CTL_WORKERS is 'two', want a whole number, 1 to 100000"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is ''"),
        ({"CTL_SERVICE": ""}, "CTL_WORKERS is set and CTL_SERVICE is not"),
        ({"JOB_COMPLETION_INDEX": "2"}, "make 2 processes: set the Job's completions to that"),
        ({"CTL_PORT": "tcp://10.0.0.1"}, "CTL_PORT is 'tcp://10.0.0.1'"),
        ({"CTL_PORT": "65536"}, "CTL_PORT is '65536', want a whole number, 1 to 65535"),
        ({"CTL_PORT": "٣"}, "CTL_PORT is '٣'"),
        ({"CTL_WORKERS": "²"}, "CTL_WORKERS is '²'"),
        ({"CTL_WORKERS": "999999999"}, "CTL_WORKERS is '999999999'"),
        ({"CTL_WORKERS": "9" * 5000}, "CTL_WORKERS is '9999"),
        (
            {"CTL_JOB": "a b"},
            "CTL_JOB is 'a b' and CTL_SERVICE is 'ctl', which make no host's name",
        ),
        ({"CTL_SERVICE": "a..b"}, "which make no host's name"),
    ],
)
def test_a_wrong_job_is_told(changed, says):
    with pytest.raises(UsageError, match=says):
        cluster.read({**JOB, **changed})


def test_places_on_this_machine_have_a_port_each():
    ports = cluster.free_ports(4)
    assert len(set(ports)) == 4
    places = cluster.local(workers=2, servers=1, ports=ports)
    assert [place.name for place in places] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert [int(place.address.rsplit(":")[-1]) for place in places] == ports
    assert all(cluster.parse(place.tf_config()) == place for place in places)


def waiting(place, said, found):
    try:
        cluster.wait_for_others(place, limit=20, print_line=said.append, every=0.2)
        found.append(place.name)
    except (Failure, UsageError) as error:
        found.append(str(error))


def test_all_wait_for_a_late_one_and_say_so():
    places = cluster.local(workers=3, servers=0, ports=cluster.free_ports(3))
    said, found = [], []
    threads = [threading.Thread(target=waiting, args=(p, said, found)) for p in places]
    for thread in threads[:2]:
        thread.start()
    time.sleep(1.0)
    assert found == []
    assert f"worker 0 waits for worker 2 ({places[2].address})." in said
    threads[2].start()
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(found) == ["worker 0", "worker 1", "worker 2"]


def test_waiting_has_an_end():
    place, _ = cluster.local(workers=2, servers=0, ports=cluster.free_ports(2))
    with pytest.raises(Failure, match=r"worker 0 waited 0 s for worker 1 \(localhost:\d+\): start"):
        cluster.wait_for_others(place, limit=0.3, print_line=lambda line: None)


def test_a_port_in_use_is_told():
    place, _ = cluster.local(workers=2, servers=0, ports=cluster.free_ports(2))
    with socket.socket() as other:
        other.bind(("", int(place.address.rsplit(":")[-1])))
        other.listen()
        with pytest.raises(
            UsageError, match=r"worker 0 cannot listen at localhost:\d+ \(Address al"
        ):
            cluster.wait_for_others(place, limit=1, print_line=lambda line: None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (text(role=["worker"]), r"says that this task is a \['worker'\]"),
        (text(role={}), "says that this task is a {}"),
        (text(index="²"), "has '²' for the task's index"),
        (text(index="--1"), "has '--1' for the task's index"),
        (text(index="9" * 5000), "for the task's index: want a whole number"),
        (text({"worker": ["a:٣", "b:2"]}), "has 'a:٣' for 'worker'"),
        (text({"worker": ["a..b:1", "b:2"]}), "has 'a..b:1' for 'worker'"),
        (text({"worker": ["a" * 64 + ":1", "b:2"]}), "want host:port"),
        (text({"worker": ["a\0b:1", "b:2"]}), "want host:port"),
        ("[" * 99_999, "is not JSON"),
    ],
)
def test_what_only_looks_right_is_told(given, says):
    with pytest.raises(UsageError, match=says):
        cluster.read({"TF_CONFIG": given})


def test_a_cluster_of_thousands_is_checked_at_once():
    start = time.process_time()
    found = cluster.parse(text({"worker": [f"host-{i}:1" for i in range(50_000)]}))
    assert found.size == 50_000
    assert time.process_time() - start < 10
