"""The Kubernetes manifests are valid and match what the program reads; no cluster, no network."""

import functools
import json
import os
import re
import subprocess

import kubernetes_validate
import pytest
import yaml

import ctl
from ctl.hardware.engines import from_environment
from tests.support import child

DEPLOY = child.ROOT / "deploy"
RESIZE = DEPLOY / "kubernetes/resize.sh"
MANIFESTS = {path.name: path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))}
# Name -> the kinds of its tasks, in the order of their indexes.
CLUSTERS = {
    "multi-worker.yaml": ("worker", "worker"),
    "parameter-server.yaml": ("chief", "worker", "worker", "ps"),
}
SINGLE = ("gpu.yaml", "tpu.yaml")
JOBS = (*CLUSTERS, *SINGLE)
OPERATORS = ("jobset.yaml", "tfjob.yaml")  # their Jobs are resources of operators
TRAINING = (*JOBS, *OPERATORS)
# The oldest version that the manifests support, and the newest that the pinned validator knows.
VERSIONS = ("1.31", "1.37")


# The fields of the resources of operators, by the path of the object. From JobSet 0.8
# (api/jobset/v1alpha2/jobset_types.go) and the training operator 1.9 (pkg/apis/kubeflow.org/v1).
FIELDS = {
    "jobset.x-k8s.io/v1alpha2": {
        "spec": "failurePolicy network replicatedJobs startupPolicy successPolicy suspend",
        "spec.failurePolicy": "maxRestarts rules",
        "spec.failurePolicy.rules": "action name onJobFailureReasons targetReplicatedJobs",
        "spec.network": "enableDNSHostnames publishNotReadyAddresses subdomain",
        "spec.replicatedJobs": "name replicas template",
        "spec.successPolicy": "operator targetReplicatedJobs",
    },
    "kubeflow.org/v1": {
        "spec": "enableDynamicWorker runPolicy successPolicy tfReplicaSpecs",
        "spec.runPolicy": "activeDeadlineSeconds backoffLimit cleanPodPolicy schedulingPolicy suspend",
        "spec.tfReplicaSpecs": "Chief Evaluator Master PS Worker",
        "spec.tfReplicaSpecs.Worker": "replicas restartPolicy template",
    },
}


def validate(document, version):
    """Validates an object; the Jobs and pods in those of operators as objects of Kubernetes."""
    if document["apiVersion"] not in FIELDS:
        assert kubernetes_validate.validate(document, version, strict=True) == version
        return
    for path, fields in FIELDS[document["apiVersion"]].items():
        value = functools.reduce(dict.get, path.split("."), document)
        for each in value if isinstance(value, list) else [value]:
            assert each.keys() <= set(fields.split()), path
    template = operator_template(document)
    if "template" in template["spec"]:
        parts = {"apiVersion": "batch/v1", "kind": "Job", **template}
    else:
        parts = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        # The operator sets the restart policy.
        assert "restartPolicy" not in template["spec"]
    kubernetes_validate.validate({"metadata": {"name": "a"}, **parts}, version, strict=True)


def operator_template(document):
    """The Job of a JobSet, or the pod of a TFJob."""
    spec = document["spec"]
    (only,) = spec.get("replicatedJobs") or spec["tfReplicaSpecs"].values()
    return only["template"]


class Loader(yaml.SafeLoader):
    """Rejects a duplicate key; the loader of PyYAML silently keeps the last value."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


def documents(name):
    return list(yaml.load_all(MANIFESTS[name].read_text(), Loader))


def document(name, *kinds):
    (document,) = (d for d in documents(name) if d["kind"] in kinds)
    return document


def workload(name):
    return document(name, "Job", "JobSet", "TFJob", "Deployment")


def pod(name):
    template = operator_template(workload(name)) if name in OPERATORS else workload(name)
    return template["spec"].get("template", template)


def container(name):
    (only,) = pod(name)["spec"]["containers"]
    return only


def mounts(name):
    """The path of each mount and its volume."""
    volumes = {v["name"]: v for v in pod(name)["spec"]["volumes"]}
    return {m["mountPath"]: volumes[m["name"]] for m in container(name)["volumeMounts"]}


def environment(name):
    variables, values = container(name)["env"], {}
    for variable in variables:
        value = variable.get("value")
        if "valueFrom" in variable:
            reference = variable["valueFrom"]["configMapKeyRef"]
            config = document(name, "ConfigMap")
            assert reference["name"] == config["metadata"]["name"]
            value = config["data"][reference["key"]]
        values[variable["name"]] = value
    assert len(values) == len(variables)
    return values


def read_clusters(name, count, **changes):
    """The cluster that the program reads in each pod, to which Kubernetes adds the index."""
    variables = environment(name) | changes
    pods = [variables | {"JOB_COMPLETION_INDEX": str(i)} for i in range(count)]
    clusters = [from_environment(each) for each in pods]
    assert len({str(c.spec()) for c in clusters}) == 1 and clusters[0].size == count
    return clusters


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_document_matches_the_schema(name, version):
    assert documents(name)
    for document in documents(name):
        validate(document, version)
    assert kubernetes_validate.latest_version() == f"{VERSIONS[-1]}.0"  # is tested, too


def test_resizing_stops_the_job_and_changes_all_numbers_together(tmp_path):
    # The commands change copies of the objects of the manifest, as the server would.
    (tmp_path / "kubectl").write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> "$LOG"\n')
    (tmp_path / "kubectl").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    command = ["bash", RESIZE, "mnist-multi-worker", "3"]
    subprocess.run(command, env=variables, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[1].startswith("wait --for=condition=Suspended") and len(lines) == 4
    job, config = document("multi-worker.yaml", "Job"), document("multi-worker.yaml", "ConfigMap")
    for line in (lines[0], *lines[2:]):
        _, kind, name, _, _, patch = line.split(" ", 5)
        target = {"job": job, "configmap": config}[kind]
        assert name == target["metadata"]["name"]
        for key, values in json.loads(patch).items():
            target[key] |= values
        for version in VERSIONS:
            validate(target, version)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert config["data"] == {"workers": "3"} and job["spec"]["suspend"] is False
    clusters = read_clusters("multi-worker.yaml", 3, CTL_WORKERS="3")
    assert [c.index for c in clusters] == [0, 1, 2]


def test_number_that_resizing_cannot_use_is_rejected():
    done = subprocess.run(["bash", RESIZE, "job", "-1"], capture_output=True, text=True)
    assert done.returncode == 2 and "must be a whole number from 1" in done.stderr


def test_pods_of_a_job_set_have_its_host_names():
    job_set = workload("jobset.yaml")
    (job,), name = job_set["spec"]["replicatedJobs"], job_set["metadata"]["name"]
    assert job["replicas"] == 1 and job_set["spec"]["network"]["subdomain"] == name
    # Of JobSet: pod i of job j of a replicated job has the name NAME-JOB-j-i.SUBDOMAIN.
    hosts = [f"{name}-{job['name']}-0-{i}.{name}:2222" for i in range(2)]
    assert [c.address for c in read_clusters("jobset.yaml", 2)] == hosts
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert job_set["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]


@pytest.mark.parametrize("name", [*SINGLE, "tfjob.yaml"])
def test_other_pods_have_no_cluster_of_the_manifest(name):
    assert from_environment(environment(name)) is None


def test_pods_of_a_tf_job_get_their_cluster_from_the_operator():
    (port,) = container("tfjob.yaml")["ports"]
    # Of the operator: the names of the container and of the port from which it makes TF_CONFIG.
    assert (container("tfjob.yaml")["name"], port["name"]) == ("tensorflow", "tfjob-port")


@pytest.mark.parametrize(("name", "kinds"), CLUSTERS.items())
def test_each_task_has_a_pod_with_the_host_name_that_kubernetes_assigns(name, kinds):
    job, service = document(name, "Job"), document(name, "Service")
    title, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    assert title == f"mnist-{name.removesuffix('.yaml')}"
    assert pod(name)["spec"]["subdomain"] == subdomain
    hosts = [f"{title}-{i}.{subdomain}:2222" for i in range(len(kinds))]
    clusters = read_clusters(name, len(kinds))
    assert [(c.role, c.address) for c in clusters] == list(zip(kinds, hosts, strict=True))
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(kinds)
    assert job["spec"]["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]  # the chief
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    ports = (*service["spec"]["ports"], *container(name)["ports"])
    assert {p.get("port", p.get("containerPort")) for p in ports} == {2222}
    assert service["spec"]["selector"] == pod(name)["metadata"]["labels"]


def test_no_two_jobs_share_labels_or_a_workdir():
    assert len({str(pod(name)["metadata"]["labels"]) for name in TRAINING}) == len(TRAINING)
    assert len({container(name)["command"][-1] for name in TRAINING}) == len(TRAINING)


@pytest.mark.parametrize("name", TRAINING)
def test_all_documents_of_a_manifest_have_the_labels_of_its_pods(name):
    labels = pod(name)["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == workload(name)["metadata"]["name"]
    assert all(d["metadata"]["labels"] == labels for d in documents(name))
    if name not in SINGLE:  # only the pods of a Job may connect to each other
        policy = document(name, "NetworkPolicy")["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_the_tpu_job_is_one_host_with_all_chips_of_its_slice():
    assert "completions" not in document("tpu.yaml", "Job")["spec"]
    selector = pod("tpu.yaml")["spec"]["nodeSelector"]
    rows, columns = selector["cloud.google.com/gke-tpu-topology"].split("x")
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    resources = container("tpu.yaml")["resources"]
    for kind in ("requests", "limits"):
        assert resources[kind]["google.com/tpu"] == int(rows) * int(columns)


def test_the_gpu_job_is_one_pod_with_shared_memory_for_nccl():
    resources = container("gpu.yaml")["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
    assert mounts("gpu.yaml")["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_tensorboard_reads_the_runs_and_its_service_selects_it():
    only, service = container("tensorboard.yaml"), document("tensorboard.yaml", "Service")["spec"]
    labels = pod("tensorboard.yaml")["metadata"]["labels"]
    selector = workload("tensorboard.yaml")["spec"]["selector"]["matchLabels"]
    assert selector == service["selector"] == labels
    assert only["ports"][0]["name"] == service["ports"][0]["targetPort"]
    (runs,) = (m for m in only["volumeMounts"] if m["mountPath"] == "/runs")
    assert runs["readOnly"] is True and "--logdir=/runs" in only["command"]


@pytest.mark.parametrize("name", JOBS)
def test_exit_codes_have_rules_and_that_of_a_user_error_comes_first(name):
    rules = document(name, "Job")["spec"]["podFailurePolicy"]["rules"]
    codes = {"containerName": container(name)["name"], "operator": "In"}
    assert rules == [
        {"action": "FailJob", "onExitCodes": {**codes, "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [75]}},
    ]
    assert pod(name)["spec"]["restartPolicy"] == "Never"
    assert document(name, "Job")["spec"]["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize("name", (*TRAINING, "tensorboard.yaml"))
def test_the_runs_are_on_the_shared_volume(name):
    claim = document("storage.yaml", "PersistentVolumeClaim")
    volume = mounts(name)["/runs"]["persistentVolumeClaim"]
    assert volume["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


EXPERIMENTS = {
    "gpu.yaml": "mirrored", "tpu.yaml": "tpu", "parameter-server.yaml": "parameter_server"
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_the_command_runs_the_program_without_a_shell(name):
    *program, config, workdir = container(name)["command"]
    assert program == ["python", "-m", "ctl.main"]  # a shell would not forward a signal
    assert config == f"--config=experiments/mnist_{EXPERIMENTS.get(name, 'multi_worker')}.py"
    assert re.fullmatch(r"--workdir=/runs/[\w-]+", workdir)


@pytest.mark.parametrize("name", TRAINING)
def test_pods_have_time_to_save_and_the_least_privileges(name):
    spec, only = pod(name)["spec"], container(name)
    assert spec["terminationGracePeriodSeconds"] >= 120
    assert spec["shareProcessNamespace"] is True
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["automountServiceAccountToken"] is False
    resources = only["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert "cpu" in resources["requests"] and "cpu" not in resources["limits"]
    if only["securityContext"]["readOnlyRootFilesystem"]:
        assert environment(name)["HOME"] in mounts(name)


def test_the_dockerfile_builds_the_images_with_the_user_of_the_pods():
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    images = set(re.findall(r"^#   docker build .*-t (\S+)", dockerfile, re.MULTILINE))
    assert {container(name)["image"] for name in TRAINING} <= images
    assert {image.split("-")[0] for image in images} == {f"ctl:{ctl.__version__}"}
    (user,) = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    for name in TRAINING:
        context = pod(name)["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == tuple(map(int, user))
    project = (child.ROOT / "pyproject.toml").read_text()
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in set(re.findall(r"EXTRA=(\w+)", dockerfile)):
        assert re.search(rf"^{extra} = \[", extras, re.MULTILINE), extra


def test_the_image_copies_what_it_needs():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    included = {line[1:] for line in ignored if line.startswith("!")}
    assert included == {"pyproject.toml", "README.md", "LICENSE", "ctl", "experiments"}


def test_the_readme_lists_every_manifest_and_exit_code():
    readme = (DEPLOY / "kubernetes/README.md").read_text()
    assert set(MANIFESTS) == set(re.findall(r"^\| `(\S+\.yaml)`", readme, re.MULTILINE))
    assert {"0", "1", "2", "75"} <= set(re.findall(r"^\| (\d+) \|", readme, re.MULTILINE))
    assert all(version in readme for version in VERSIONS)
