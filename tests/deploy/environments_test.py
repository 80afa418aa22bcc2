"""Two workers train in the environment that each platform sets, on two hosts with its host names.

The hosts are network namespaces. What a platform adds to the variables of a manifest is written as its
source or its documentation does, which is named next to it.
"""

import json
import sys

import pytest

from benchmarks.network.namespaces import Hosts, Unavailable
from ctl import main
from tests.deploy.kubernetes_test import environment
from tests.support import child, experiments

pytestmark = pytest.mark.slow


def indexed_job(name, host):
    """Kubernetes adds the index; a headless Service gives pod i the host name JOB-i.SERVICE."""
    variables = environment(name)
    hosts = [f"{variables['CTL_JOB']}-{i}.{variables['CTL_SERVICE']}" for i in range(2)]
    return hosts, variables | {"JOB_COMPLETION_INDEX": str(host)}


def tf_config(role, index, **config):
    return {"TF_CONFIG": json.dumps({**config, "task": {"type": role, "index": index}})}


def tf_job(host):
    """As genTFConfigJSONStr in pkg/controller.v1/tensorflow/tensorflow.go of the training operator."""
    hosts = [f"mnist-tfjob-worker-{i}.default.svc" for i in range(2)]
    cluster = {"worker": [f"{name}:2222" for name in hosts]}
    variables = tf_config("worker", host, cluster=cluster, environment="cloud")
    return hosts, environment("tfjob.yaml") | variables


def dynamic_tf_job(host):
    """The same with enableDynamicWorker: convertClusterSpecToSparseClusterSpec of that file."""
    hosts, variables = tf_job(host)
    cluster = {"worker": {str(host): f"{hosts[host]}:2222"}, "ps": []}
    variables |= tf_config("worker", host, sparseCluster=cluster)
    return hosts, variables | {"CTL_WORKERS": "2"}


def train_job(host):
    """As EnforceMLPolicy in pkg/runtime/framework/plugins/torch of Kubeflow Trainer 2."""
    hosts = [f"mnist-node-0-{i}.mnist" for i in range(2)]
    return hosts, {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(host),
        "PET_MASTER_ADDR": hosts[0], "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": str(host),
    }  # fmt: skip


SAGEMAKER = ["algo-1", "algo-2"]


def sagemaker(host):
    """As to_env_vars in environment.py of sagemaker-training 5.1."""
    return SAGEMAKER, {"SM_HOSTS": json.dumps(SAGEMAKER), "SM_CURRENT_HOST": SAGEMAKER[host]}


def sagemaker_mirrored(host):
    """As _build_tf_config_for_mwms in training.py of sagemaker-tensorflow-training 20.5."""
    cluster = {"worker": [f"{name}:8890" for name in SAGEMAKER]}
    variables = tf_config("worker", host, cluster=cluster, environment="cloud")
    return SAGEMAKER, sagemaker(host)[1] | variables


def vertex(host):
    """As the documentation of custom training on Vertex AI shows TF_CONFIG: pool 0 is the chief."""
    pools = ["cmle-training-workerpool0-ab0123-0", "cmle-training-workerpool1-ab0123-0"]
    roles = ("chief", "worker")
    config = {
        "cluster": {role: [f"{name}:2222"] for role, name in zip(roles, pools, strict=True)},
        "task": {"type": roles[host], "index": 0, "trial": "", "cloud": "ab0123"},
        "environment": "cloud", "job": '{"python_module": "", "args": []}',
    }  # fmt: skip
    return pools, {"TF_CONFIG": json.dumps(config), "CLUSTER_SPEC": json.dumps(config)}


def sky(host):
    """As the documentation of SkyPilot shows its variables: addresses in place of names."""
    addresses = "\n".join(Hosts(2).addresses)
    return [], {
        "SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NODE_RANK": str(host), "SKYPILOT_NUM_NODES": "2",
    }  # fmt: skip


PLATFORMS = {
    "Indexed Job": lambda host: indexed_job("multi-worker.yaml", host),
    "JobSet": lambda host: indexed_job("jobset.yaml", host),
    "TFJob": tf_job,
    "dynamic TFJob": dynamic_tf_job,
    "TrainJob": train_job,
    "SageMaker": sagemaker,
    "SageMaker, multi_worker_mirrored_strategy": sagemaker_mirrored,
    "Vertex AI": vertex,
    "SkyPilot": sky,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the experiment, and its run on two replicas of one process."""
    folder = tmp_path_factory.mktemp("platforms")
    experiments.write(folder, {"experiment.py": experiments.DROPOUT})
    flags = ["--config.runtime.logical_devices=2", "--config.runtime.strategy=mirrored"]
    config = f"--config={folder / 'experiment.py'}"
    assert main.run(["ctl", config, f"--workdir={folder / 'one'}", *flags]) == 0
    return folder


# tests/hardware/engines has what each of the others sets.
@pytest.mark.parametrize(
    "platform",
    [pytest.param(p, marks=() if p == "Vertex AI" else pytest.mark.long) for p in PLATFORMS],
)
def test_platform_starts_a_run_with_the_bits_of_one_process(platform, folder):
    places = [PLATFORMS[platform](host) for host in range(2)]
    inherited = child.environment(TF_CPP_MIN_LOG_LEVEL="3")
    workdir = folder / platform
    flags = [f"--config={folder / 'experiment.py'}", f"--workdir={workdir}"]
    command = [sys.executable, "-m", "ctl.main", *flags]
    try:
        with Hosts(2, hostnames=places[0][0]) as hosts:
            workers = [
                hosts.popen(i, command, env=inherited | place[1], cwd=folder, **child.PIPES)
                for i, place in enumerate(places)
            ]
            outputs = [worker.communicate(timeout=300) for worker in workers]
    except Unavailable as error:
        pytest.skip(f"this machine cannot create network namespaces: {error}")
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert "of 2 processes): 2 replicas" in outputs[0][0]
    experiments.check_same(*map(experiments.read_weights, (workdir, folder / "one")))
