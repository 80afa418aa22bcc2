"""The processes of a run, their names and their roles."""

import pytest

from ctl.hardware import cluster
from ctl.hardware.cluster import Cluster


def test_members_are_the_processes_that_train_in_the_order_of_their_replicas():
    addresses = {"worker": ["a:1", "[::1]:2"], "ps": ["p:3"], "chief": ["c:4"]}
    members = cluster.Cluster(addresses, "worker", 0).members()
    assert members == [("chief", "c"), ("worker 0", "a"), ("worker 1", "[::1]")]


def test_local_processes_have_one_port_each():
    ports = [11, 12, 13, 14]
    clusters = cluster.make_local_clusters(workers=2, servers=1, ports=ports)
    assert [each.name for each in clusters] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert [int(each.address.rsplit(":")[-1]) for each in clusters] == ports


@pytest.mark.parametrize(
    ("roles", "workers"),
    [(["worker"] * 3, 3), (["chief", "worker"], 2), (["chief", "worker", "ps"], 1)],
)
def test_workers_are_the_processes_that_compute_gradients(roles, workers):
    addresses = {role: [f"{role}-{i}:1" for i in range(roles.count(role))] for role in roles}
    assert Cluster(addresses, roles[0], 0).num_workers == workers
