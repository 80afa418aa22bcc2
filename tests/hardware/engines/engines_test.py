"""The cluster is read from the variables of each engine."""

import itertools

import pytest

from ctl.errors import UsageError
from ctl.hardware import engines
from ctl.hardware.cluster import Cluster

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
    worker = engines.from_environment(STEP)
    assert worker.name == "worker 2"
    assert worker.addresses["worker"] == [
        f"gpu07:{PORT}", f"gpu07:{PORT + 1}", f"gpu08:{PORT}", f"gpu08:{PORT + 1}", f"login:{PORT}",
    ]  # fmt: skip
    worker = engines.from_environment(STEP | {"CTL_PORT": "5000"})
    assert worker.addresses["worker"][1] == "gpu07:5001"


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("a,gpu[09-11],b-1", ["a", "gpu09", "gpu10", "gpu11", "b-1"]),
        ("r[1-2]n[5,7].x", ["r1n5.x", "r1n7.x", "r2n5.x", "r2n7.x"]),
    ],
)
def test_lists_of_nodes_are_expanded(nodes, hosts):
    count = str(len(hosts))
    node = {
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_TASKS": count, "SLURM_PROCID": "0",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})", "SLURM_NODEID": "0",
    }  # fmt: skip
    worker = engines.from_environment(STEP | node)
    assert [address.partition(":")[0] for address in worker.addresses["worker"]] == hosts


def test_steps_that_share_a_node_have_different_ports():
    node = {
        "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "40", "SLURM_STEP_TASKS_PER_NODE": "40",
        "SLURM_PROCID": "0", "SLURM_NODEID": "0",
    }  # fmt: skip
    ports = set()
    for job, step in itertools.product(("100", "101", "102"), ("0", "1", "2")):
        names = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}
        ports |= {*engines.from_environment(STEP | node | names).addresses["worker"]}
    assert len(ports) == 9 * 40


def test_tasks_may_also_be_parameter_servers():
    with_servers = engines.from_environment(STEP | {"CTL_PS": "1"})
    counts = {role: len(tasks) for role, tasks in with_servers.addresses.items()}
    assert counts == {"chief": 1, "worker": 3, "ps": 1}
    assert (with_servers.role, with_servers.index) == ("worker", 1)


JOB = {"CTL_JOB": "mnist", "CTL_SERVICE": "ctl", "CTL_WORKERS": "2", "JOB_COMPLETION_INDEX": "1"}


def test_pods_of_an_indexed_job_are_identified_by_their_index():
    worker = engines.from_environment(JOB)
    assert worker == Cluster({"worker": ["mnist-0.ctl:2222", "mnist-1.ctl:2222"]}, "worker", 1)
    with_servers = {**JOB, "CTL_PS": "1", "CTL_PORT": "99"}
    clusters = [
        engines.from_environment({**with_servers, "JOB_COMPLETION_INDEX": str(i)}) for i in range(4)
    ]
    assert [each.name for each in clusters] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert clusters[3].address == "mnist-3.ctl:99"


MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "630980609"}
ONE_HOST = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "23456"}
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "none"}
TRAINER = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "mnist-node-0-0.mnist", "PET_MASTER_PORT": "29400",
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.3\n10.0.0.4", "SKYPILOT_NODE_RANK": "1"}
DSTACK = {"DSTACK_NODES_IPS": "10.0.0.3\n10.0.0.4", "DSTACK_NODE_RANK": "1"}
STEP_OF_TWO = STEP | {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
}  # fmt: skip
SLURM_ADDRESSES = [f"a:{PORT}", f"b:{PORT}"]


@pytest.mark.parametrize(
    ("variables", "addresses"),
    [
        (SAGEMAKER, ["algo-1:2222", "algo-2:2222"]),
        (SAGEMAKER | {"CTL_PORT": "99"}, ["algo-1:99", "algo-2:99"]),
        (SKYPILOT, ["10.0.0.3:2222", "10.0.0.4:2222"]),
        (DSTACK, ["10.0.0.3:2222", "10.0.0.4:2222"]),
        # An engine inside of another one, with the same processes: the other one has the addresses.
        (STEP_OF_TWO | MPICH, SLURM_ADDRESSES),  # srun --mpi=pmi2
        (STEP_OF_TWO | TORCH, SLURM_ADDRESSES),  # exported in the script
        (SAGEMAKER | MPI, ["algo-1:2222", "algo-2:2222"]),
    ],
)
def test_hosts_of_the_engine_are_the_addresses(variables, addresses):
    worker = engines.from_environment(variables)
    assert (worker.addresses, worker.name) == ({"worker": addresses}, "worker 1")
    assert not worker.meeting


@pytest.mark.parametrize(
    ("variables", "meeting"),
    [
        (ONE_HOST, "localhost:19408"),
        (MPI | {"MASTER_ADDR": "head"}, "head:19408"),
        (MPICH, "localhost:29500"),
        (TORCH, "node-0:23456"),
        (TRAINER, "mnist-node-0-0.mnist:29400"),
        # Its processes are others than the tasks of the step, which are the daemons of mpirun.
        (STEP | ONE_HOST | {"SLURM_PROCID": "x"}, "localhost:19408"),
        (STEP | TORCHRUN, "node-0:23456"),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "node-0:23457"),
    ],
)
def test_processes_that_know_their_ranks_only_meet_at_the_host_of_rank_0(variables, meeting):
    worker = engines.from_environment(variables)
    assert (worker.name, worker.size, worker.meeting) == ("worker 1", 2, meeting)


@pytest.mark.parametrize("variables", [SAGEMAKER, SKYPILOT, TORCH, STEP, ONE_HOST])
def test_tf_config_and_the_variables_of_ctl_take_precedence(variables):
    text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    assert engines.from_environment(variables | {"TF_CONFIG": text}).address == "a:1"
    assert engines.from_environment(variables | {"TF_CONFIG": "{}"}) is None
    assert engines.from_environment(variables | JOB).address == "mnist-1.ctl:2222"


@pytest.mark.parametrize(
    "variables",
    [
        # Without the rank, which a program took from Slurm.
        {"WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "5"},  # the shell of an allocation
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "gold"},
        TORCH | {"WORLD_SIZE": "1", "RANK": "0"},
        SAGEMAKER | {"SM_HOSTS": '["algo-1"]'},
        SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.3"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_one_process_of_an_engine_is_a_run_of_one_process(variables):
    assert engines.from_environment(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            STEP | TORCH,
            "by MASTER_ADDR this is worker 1 of 2 processes, and by Slurm worker 2 of 5",
        ),
        (STEP | {"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, "--distribution=block"),  # cyclic
        (STEP | {"SLURM_PROCID": "7"}, "--distribution=block"),
        (STEP | {"SLURM_NODEID": "9"}, "--distribution=block"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, "--distribution=block"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "cannot be read"),
        (STEP | {"SLURM_STEP_NODELIST": "gpu[a-b],login"}, "cannot be read"),
        (STEP | {"SLURM_PROCID": ""}, "SLURM_PROCID is '', but must be a whole number"),
        (STEP | {"CTL_PORT": "65534"}, "CTL_PORT is '65534'"),  # too large for the second task
        (STEP | {"CTL_PS": "4"}, "at least 6 tasks"),
        (JOB | {"CTL_WORKERS": "0"}, "CTL_WORKERS is '0', but must be a whole number from 1 to"),
        (JOB | {"CTL_WORKERS": "9" * 5000}, "CTL_WORKERS is '9999"),
        (JOB | {"CTL_PORT": "65536"}, "CTL_PORT is '65536', but must be .* from 1 to 65535"),
        (JOB | {"CTL_PORT": "٣"}, "CTL_PORT is '٣'"),
        (JOB | {"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is ''"),
        (JOB | {"CTL_SERVICE": ""}, "CTL_WORKERS is set but CTL_SERVICE is not"),
        (JOB | {"JOB_COMPLETION_INDEX": "2"}, "define 2 processes: set the Job's completions to 2"),
        (JOB | {"CTL_JOB": "a b"}, "CTL_JOB is 'a b' and CTL_SERVICE is 'ctl', which do not"),
        (JOB | {"CTL_SERVICE": "a..b"}, "which do not form a valid host name"),
        (SAGEMAKER | SKYPILOT | {"SKYPILOT_NODE_RANK": "0"}, "SM_HOSTS and SKYPILOT_NODE_IPS"),
        (MPI, "set MASTER_ADDR to the host of rank 0 in all of them, such as by `mpirun -x"),
        (TORCH | {"MASTER_ADDR": "a b"}, "set MASTER_ADDR to the host of rank 0"),
        (TORCH | {"RANK": "2"}, "RANK is '2', but must be a whole number from 0 to 1"),
        (TRAINER | {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        (SAGEMAKER | {"SM_HOSTS": "[1"}, r"SM_HOSTS is '\[1', but must be a list of hosts"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST is 'algo-3', which is not"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK is '2'"),
    ],
)
def test_contradictions_and_invalid_variables_are_reported_in_one_line(variables, message):
    with pytest.raises(UsageError, match=message) as error:
        engines.from_environment(variables)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "none: a run of one process"),
        (STEP, "Slurm, since SLURM_STEP_NUM_TASKS is set: worker 2 of 5 processes"),
        (ONE_HOST | STEP, "processes; SLURM_STEP_NUM_TASKS not used"),
        ({"TF_CONFIG": "{}"}, "TF_CONFIG, since TF_CONFIG is set: a run of one process"),
    ],
)
def test_engine_is_described_with_the_reason(variables, text):
    assert engines.describe(variables).endswith(text)
