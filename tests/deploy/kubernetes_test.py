"""The Kubernetes manifests are valid and match what the program reads; no cluster, no network."""

import functools
import json
import os
import re
import socket
import subprocess

import kubernetes_validate
import pytest
import yaml

import ctl
from ctl.hardware.engines import from_environment
from tests.support import child

DEPLOY = child.ROOT / "deploy"
MANIFESTS = {path.name: path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))}
# Name -> the kinds of its tasks, in the order of their indexes.
CLUSTERS = {
    "multi-worker.yaml": ("worker", "worker"),
    "parameter-server.yaml": ("chief", "worker", "worker", "ps"),
}
JOBS = (*CLUSTERS, "gpu.yaml", "tpu.yaml")
OPERATORS = ("jobset.yaml", "tfjob.yaml")  # their Jobs are resources of operators
# The oldest version that the manifests support, and the newest that the pinned validator knows.
VERSIONS = ("1.31", "1.37")


# The fields of the resources of operators, by the path of the object. From JobSet 0.8
# (api/jobset/v1alpha2/jobset_types.go) and the training operator 1.9 (pkg/apis/kubeflow.org/v1).
FIELDS = {
    "jobset.x-k8s.io/v1alpha2": {
        (): "failurePolicy network replicatedJobs startupPolicy successPolicy suspend",
        ("failurePolicy",): "maxRestarts rules",
        ("failurePolicy", "rules"): "action name onJobFailureReasons targetReplicatedJobs",
        ("network",): "enableDNSHostnames publishNotReadyAddresses subdomain",
        ("replicatedJobs",): "name replicas template",
        ("successPolicy",): "operator targetReplicatedJobs",
    },
    "kubeflow.org/v1": {
        (): "enableDynamicWorker runPolicy successPolicy tfReplicaSpecs",
        (
            "runPolicy",
        ): "activeDeadlineSeconds backoffLimit cleanPodPolicy schedulingPolicy suspend",
        ("tfReplicaSpecs",): "Chief Evaluator Master PS Worker",
        ("tfReplicaSpecs", "Worker"): "replicas restartPolicy template",
    },
}


def validate(document, version):
    """Validates an object; the Jobs and pods in those of operators as objects of Kubernetes."""
    if document["apiVersion"] not in FIELDS:
        assert kubernetes_validate.validate(document, version, strict=True) == version
        return
    for path, fields in FIELDS[document["apiVersion"]].items():
        found = functools.reduce(dict.get, path, document["spec"])
        for each in found if isinstance(found, list) else [found or {}]:
            assert each.keys() <= set(fields.split()), path
    for template in templates(document):
        if "template" in template["spec"]:
            parts = {"apiVersion": "batch/v1", "kind": "Job", **template}
        else:
            parts = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
            # The operator sets the restart policy.
            assert "restartPolicy" not in template["spec"]
        kubernetes_validate.validate({"metadata": {"name": "a"}, **parts}, version, strict=True)


def templates(document):
    """The Jobs of a JobSet, or the pods of a TFJob."""
    spec = document["spec"]
    jobs = spec.get("replicatedJobs") or spec["tfReplicaSpecs"].values()
    return [job["template"] for job in jobs]


class Loader(yaml.SafeLoader):
    """Rejects a duplicate key; the loader of PyYAML silently keeps the last value."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


def documents(name):
    return list(yaml.load_all(MANIFESTS[name].read_text(), Loader))


def document(name, kind):
    (document,) = (d for d in documents(name) if d["kind"] == kind)
    return document


def pod(name):
    if name not in OPERATORS:
        return document(name, "Job")["spec"]["template"]
    (template,) = templates(documents(name)[-1])
    return template["spec"].get("template", template)


def container(name):
    (only,) = pod(name)["spec"]["containers"]
    return only


def environment(name):
    variables = container(name)["env"]
    assert len({v["name"] for v in variables}) == len(variables)
    values = {}
    for variable in variables:
        reference = variable.get("valueFrom", {}).get("configMapKeyRef")
        if reference:
            config = document(name, "ConfigMap")
            assert reference["name"] == config["metadata"]["name"]
            values[variable["name"]] = config["data"][reference["key"]]
        else:
            values[variable["name"]] = variable["value"]
    return values


def cluster(variables):
    """The tasks in the order of their indexes, as deploy/kubernetes/README.md specifies them."""
    workers, servers = int(variables["CTL_WORKERS"]), int(variables.get("CTL_PS", "0"))
    kinds = ["worker"] * workers
    if servers:
        kinds = ["chief", *kinds, *["ps"] * servers]
    job, service, port = (variables[f"CTL_{name}"] for name in ("JOB", "SERVICE", "PORT"))
    return [(kind, f"{job}-{i}.{service}:{port}") for i, kind in enumerate(kinds)]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the test opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_document_matches_the_schema(name, version):
    assert documents(name)
    for document in documents(name):
        validate(document, version)


def test_the_newest_tested_version_is_the_newest_of_the_validator():
    assert kubernetes_validate.latest_version() == f"{VERSIONS[-1]}.0"


def test_resizing_stops_the_job_and_changes_all_numbers_together(tmp_path):
    # The commands change copies of the objects of the manifest, as the server would.
    (tmp_path / "kubectl").write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> "$LOG"\n')
    (tmp_path / "kubectl").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    command = ["bash", DEPLOY / "kubernetes/resize.sh", "mnist-multi-worker", "3"]
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
            assert kubernetes_validate.validate(target, version, strict=True) == version
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert config["data"] == {"workers": "3"} and job["spec"]["suspend"] is False
    pods = [
        environment("multi-worker.yaml") | {"CTL_WORKERS": "3", "JOB_COMPLETION_INDEX": str(i)}
        for i in range(3)
    ]
    clusters = [from_environment(variables) for variables in pods]
    assert [c.index for c in clusters] == [0, 1, 2] and len({str(c.spec()) for c in clusters}) == 1


def test_number_that_resizing_cannot_use_is_rejected():
    script = DEPLOY / "kubernetes/resize.sh"
    done = subprocess.run(["bash", script, "job", "-1"], capture_output=True, text=True)
    assert done.returncode == 2 and "must be a whole number from 1" in done.stderr


def test_pods_of_a_job_set_have_its_host_names():
    job_set, variables = documents("jobset.yaml")[-1], environment("jobset.yaml")
    (job,), name = job_set["spec"]["replicatedJobs"], job_set["metadata"]["name"]
    # Of JobSet: pod i of job j of a replicated job has the name NAME-JOB-j-i.SUBDOMAIN.
    assert variables["CTL_JOB"] == f"{name}-{job['name']}-0" and job["replicas"] == 1
    assert variables["CTL_SERVICE"] == job_set["spec"]["network"]["subdomain"] == name
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == len(cluster(variables))
    assert cluster(variables)[1] == ("worker", "mnist-jobset-node-0-1.mnist-jobset:2222")
    assert job_set["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]


def test_pods_of_a_tf_job_get_their_cluster_from_the_operator():
    assert not [name for name in environment("tfjob.yaml") if name.startswith(("CTL_", "TF_"))]
    (port,) = container("tfjob.yaml")["ports"]
    # Of the operator: the names of the container and of the port from which it makes TF_CONFIG.
    assert (container("tfjob.yaml")["name"], port["name"]) == ("tensorflow", "tfjob-port")


@pytest.mark.parametrize("name", OPERATORS)
def test_policy_and_labels_of_an_operators_pods_are_their_own(name):
    policy, resource = documents(name)
    labels = pod(name)["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert labels["app.kubernetes.io/instance"] == resource["metadata"]["name"]
    assert policy["metadata"]["labels"] == resource["metadata"]["labels"] == labels


@pytest.mark.parametrize(("name", "kinds"), CLUSTERS.items())
def test_each_task_has_a_pod_with_the_host_name_that_kubernetes_assigns(name, kinds):
    job, service = document(name, "Job"), document(name, "Service")
    variables, title = environment(name), job["metadata"]["name"]
    assert variables["CTL_JOB"] == title == f"mnist-{name.removesuffix('.yaml')}"
    assert variables["CTL_SERVICE"] == service["metadata"]["name"] == pod(name)["spec"]["subdomain"]
    hosts = [f"{title}-{i}.{variables['CTL_SERVICE']}:2222" for i in range(len(kinds))]
    assert cluster(variables) == list(zip(kinds, hosts, strict=True))
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(kinds)
    assert job["spec"]["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]  # the chief
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    ports = (*service["spec"]["ports"], *container(name)["ports"])
    assert {p.get("port", p.get("containerPort")) for p in ports} == {int(variables["CTL_PORT"])}
    labels = pod(name)["metadata"]["labels"]
    policy = document(name, "NetworkPolicy")["spec"]
    assert service["spec"]["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_no_two_jobs_share_labels_or_a_workdir():
    names = JOBS + OPERATORS
    assert len({str(pod(name)["metadata"]["labels"]) for name in names}) == len(names)
    assert len({container(name)["command"][-1] for name in names}) == len(names)


@pytest.mark.parametrize("name", JOBS)
def test_all_documents_of_a_manifest_have_the_labels_of_its_pods(name):
    labels = pod(name)["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == document(name, "Job")["metadata"]["name"]
    assert all(d["metadata"]["labels"] == labels for d in documents(name))


def test_the_tpu_job_is_one_host_with_all_chips_of_its_slice():
    assert not [name for name in environment("tpu.yaml") if name.startswith("CTL_")]
    assert "completions" not in document("tpu.yaml", "Job")["spec"]
    selector = pod("tpu.yaml")["spec"]["nodeSelector"]
    rows, columns = selector["cloud.google.com/gke-tpu-topology"].split("x")
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    resources = container("tpu.yaml")["resources"]
    for kind in ("requests", "limits"):
        assert resources[kind]["google.com/tpu"] == int(rows) * int(columns)


def test_the_gpu_job_is_one_pod_with_shared_memory_for_nccl():
    assert not [name for name in environment("gpu.yaml") if name.startswith("CTL_")]
    resources = container("gpu.yaml")["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
    mounts = {m["mountPath"]: m["name"] for m in container("gpu.yaml")["volumeMounts"]}
    volumes = {v["name"]: v for v in pod("gpu.yaml")["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_tensorboard_reads_the_runs_and_its_service_selects_it():
    deployment = document("tensorboard.yaml", "Deployment")["spec"]
    spec = deployment["template"]["spec"]
    (only,) = spec["containers"]
    service = document("tensorboard.yaml", "Service")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    assert only["ports"][0]["name"] == service["ports"][0]["targetPort"]
    mounts = {m["mountPath"]: m for m in only["volumeMounts"]}
    volumes = {v["name"]: v for v in spec["volumes"]}
    claim = document("storage.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    assert volumes[mounts["/runs"]["name"]]["persistentVolumeClaim"]["claimName"] == claim
    assert mounts["/runs"]["readOnly"] is True and "--logdir=/runs" in only["command"]


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


@pytest.mark.parametrize(
    ("name", "experiment"),
    [
        ("multi-worker.yaml", "mnist_multi_worker"),
        ("parameter-server.yaml", "mnist_parameter_server"),
        ("gpu.yaml", "mnist_mirrored"),
        ("tpu.yaml", "mnist_tpu"),
        ("jobset.yaml", "mnist_multi_worker"),
        ("tfjob.yaml", "mnist_multi_worker"),
    ],
)
def test_the_command_runs_the_program_with_a_workdir_on_the_shared_volume(name, experiment):
    *program, config, workdir = container(name)["command"]
    assert program == ["python", "-m", "ctl.main"]  # a shell would not forward a signal
    assert config == f"--config=experiments/{experiment}.py"
    assert re.fullmatch(r"--workdir=/runs/[\w-]+", workdir)
    mounts = {m["mountPath"]: m["name"] for m in container(name)["volumeMounts"]}
    volumes = {v["name"]: v for v in pod(name)["spec"]["volumes"]}
    claim = document("storage.yaml", "PersistentVolumeClaim")
    assert (
        volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    )
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", (*JOBS, *OPERATORS))
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
        assert environment(name)["HOME"] in {m["mountPath"] for m in only["volumeMounts"]}


def test_the_dockerfile_builds_the_images_with_the_user_of_the_pods():
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    images = set(re.findall(r"^#   docker build .*-t (\S+)", dockerfile, re.MULTILINE))
    assert {container(name)["image"] for name in JOBS} <= images
    assert {image.split("-")[0] for image in images} == {f"ctl:{ctl.__version__}"}
    (user,) = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    for name in JOBS:
        context = pod(name)["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == tuple(map(int, user))
    project = (child.ROOT / "pyproject.toml").read_text()
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in set(re.findall(r"EXTRA=(\w+)", dockerfile)):
        assert re.search(rf"^{extra} = \[", extras, re.MULTILINE), extra


def test_the_files_that_the_image_copies_exist():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    included = [line[1:] for line in ignored if line.startswith("!")]
    assert {"pyproject.toml", "README.md", "LICENSE", "ctl", "experiments"} == set(included)
    assert all((child.ROOT / name).exists() for name in included)


def test_the_readme_lists_every_manifest_and_exit_code():
    readme = (DEPLOY / "kubernetes/README.md").read_text()
    assert set(MANIFESTS) == set(re.findall(r"^\| `(\S+\.yaml)`", readme, re.MULTILINE))
    assert {"0", "1", "2", "75"} <= set(re.findall(r"^\| (\d+) \|", readme, re.MULTILINE))
    assert all(version in readme for version in VERSIONS)
