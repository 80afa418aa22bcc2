"""The tasks of a Slurm step; cluster_test.py has those of an Indexed Job."""

import itertools

import pytest

from ctl.errors import UsageError
from ctl.hardware import cluster, schedulers

# srun --nodes=3 --ntasks=5, as Slurm describes it to rank 3, the first task of the second node.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
PORT = 10_000 + 16 * (37 * 4711 % 1250)


def test_tasks_have_their_nodes_and_a_port_each():
    addresses, rank = schedulers.read_slurm_step(STEP)
    assert rank == 2
    assert addresses == [
        f"gpu07:{PORT}", f"gpu07:{PORT + 1}", f"gpu08:{PORT}", f"gpu08:{PORT + 1}", f"login:{PORT}",
    ]  # fmt: skip
    assert schedulers.read_slurm_step(STEP | {"CTL_PORT": "5000"})[0][1] == "gpu07:5001"


@pytest.mark.parametrize("tasks", [2, 40])
def test_steps_that_share_a_node_have_different_ports(tasks):
    node = {
        "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks), "SLURM_PROCID": "0", "SLURM_NODEID": "0",
    }  # fmt: skip
    ports = set()
    for job, step in itertools.product(("100", "101", "102"), ("0", "1", "2")):
        names = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}
        ports |= {*schedulers.read_slurm_step(STEP | node | names)[0]}
    assert len(ports) == 9 * tasks


def test_tasks_are_workers_or_also_parameter_servers():
    workers = cluster.from_environment(STEP)
    assert (workers.role, workers.index, workers.size) == ("worker", 2, 5)
    with_servers = cluster.from_environment(STEP | {"CTL_PS": "1"})
    assert {role: len(tasks) for role, tasks in with_servers.addresses.items()} == {
        "chief": 1, "worker": 3, "ps": 1,
    }  # fmt: skip
    assert (with_servers.role, with_servers.index) == ("worker", 1)
    with pytest.raises(UsageError, match="at least 6 tasks"):
        cluster.from_environment(STEP | {"CTL_PS": "4"})


def test_other_descriptions_take_precedence():
    text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    assert cluster.from_environment(STEP | {"TF_CONFIG": text}).address == "a:1"


@pytest.mark.parametrize("environment", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "5"}])
def test_shell_of_an_allocation_and_a_single_task_are_one_process(environment):
    assert schedulers.read_slurm_step(environment) is None
    assert schedulers.read_slurm_step(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, "--distribution=block"),  # cyclic
        ({"SLURM_PROCID": "7"}, "--distribution=block"),
        ({"SLURM_NODEID": "9"}, "--distribution=block"),
        ({"CTL_PORT": "70000"}, "CTL_PORT is '70000'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "--distribution=block"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "cannot be read"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is '', but must be a number"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is '', but must be a list"),
        ({"CTL_PORT": "http"}, "CTL_PORT is 'http'"),
    ],
)
def test_invalid_variables_are_reported(changes, message):
    with pytest.raises(UsageError, match=message):
        schedulers.read_slurm_step(STEP | changes)
