"""Reads the cluster from TF_CONFIG, as Kubeflow, Vertex AI, SageMaker, Ray and ctl.launch set it."""

import collections
from collections.abc import Mapping, Sequence
import json
import re
from typing import Any

from ctl.errors import UsageError
from ctl.hardware.cluster import ADDRESS, Cluster
from ctl.hardware.engines.variables import MAX_TASKS, read_number

ROLES = ("chief", "worker", "ps", "evaluator")
# Kubeflow's name of a worker's host is JOB-worker-INDEX.NAMESPACE.svc.
_KUBEFLOW = re.compile(r"(.*-worker-)\d+(\..*)")


def read(environment: Mapping[str, str]) -> Cluster | None:
    """Parses and validates the value of TF_CONFIG.

    It is a JSON object with the keys "cluster" and "task", as `tf.distribute` defines it.

    Returns:
        The cluster without its evaluator; None if the text has no cluster, which some platforms set
        for a single process, or if this process is the evaluator.

    Raises:
        UsageError: the text is invalid.
    """
    try:
        config = json.loads(environment["TF_CONFIG"])
    except (ValueError, RecursionError) as error:  # deep nesting exhausts the parser's recursion
        raise _tf_config_error(f"is not JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
        raise _tf_config_error("must be a JSON object whose 'cluster' is an object")
    if config.get("sparseCluster"):
        workers = read_number(environment, "CTL_WORKERS", minimum=0, maximum=MAX_TASKS, default="0")
        config["cluster"] = _complete(config["sparseCluster"], workers)
    # A role without tasks counts as not listed.
    roles = {k: tasks for k, tasks in config.get("cluster", {}).items() if tasks not in ([], {})}
    if {"chief", "master"} <= roles.keys():
        raise _tf_config_error("has both 'chief' and 'master'")
    addresses = {_rename(role): _parse_tasks(role, tasks) for role, tasks in roles.items()}
    if not addresses:
        return None
    _check_roles(addresses)
    # An evaluator takes no part in the collectives: it is a run of one process.
    addresses.pop("evaluator", None)
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise _tf_config_error("must identify this process by a 'task' with 'type' and 'index'")
    role, index = _rename(task["type"]), _parse_index(task["index"])
    if role == "evaluator":
        if index:
            raise _tf_config_error(f"has the task index {index}, but a run has one evaluator")
        return None
    if not isinstance(role, str) or role not in addresses:
        raise _tf_config_error(
            f"has the task type {role!r}, but the cluster has only {', '.join(addresses)}"
        )
    if not 0 <= index < len(addresses[role]):
        raise _tf_config_error(
            f"has the task index {index}, but the indices of {role!r} are 0 to "
            f"{len(addresses[role]) - 1}"
        )
    return Cluster(addresses, role, index)


def _rename(role: Any) -> Any:
    # TensorFlow 1, the TFJob of Kubeflow and SageMaker name the chief "master".
    return "chief" if role == "master" else role


def _complete(sparse: Any, workers: int) -> dict[str, Any]:
    """Returns the cluster of Kubeflow's dynamic workers, each of which knows only its own address."""
    own = sparse.get("worker") if isinstance(sparse, dict) else None
    match = _KUBEFLOW.match(next(iter(own.values()), "")) if isinstance(own, dict) else None
    if not match or not workers:
        raise _tf_config_error(
            "has a 'sparseCluster', which does not list all workers (enableDynamicWorker): set "
            "CTL_WORKERS to their number"
        )
    return {"worker": [f"{match[1]}{i}{match[2]}" for i in range(workers)]}


def _parse_tasks(role: str, tasks: Any) -> list[str]:
    if _rename(role) not in ROLES:
        raise _tf_config_error(f"has the unknown role {role!r} (known: {', '.join(ROLES)})")
    if isinstance(tasks, dict):  # TensorFlow's sparse form, {"0": "host:port"}
        indices = sorted(tasks, key=_parse_index)
        if indices != [str(i) for i in range(len(tasks))]:
            raise _tf_config_error(
                f"lists the tasks {', '.join(indices)} of {role!r}, but must list all from 0 on"
            )
        tasks = [tasks[index] for index in indices]
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise _tf_config_error(f"must list the tasks of {role!r} as strings host:port")
    for task in tasks:
        match = ADDRESS.fullmatch(task)
        if not match or not 0 < int(match[2]) < 2**16:
            raise _tf_config_error(f"has the address {task!r} for {role!r}, which is not host:port")
    return tasks


def _check_roles(addresses: Mapping[str, Sequence[str]]) -> None:
    # If two tasks had one address, one could not bind its port, and the others would wait for it.
    counts = collections.Counter(a for tasks in addresses.values() for a in tasks)
    repeated = sorted(address for address, count in counts.items() if count > 1)
    if repeated:
        raise _tf_config_error(f"assigns {repeated[0]} to more than one task")
    for role in ("chief", "evaluator"):
        if len(addresses.get(role, [])) > 1:
            raise _tf_config_error(f"has more than one {role}")
    if addresses.get("ps") and not (addresses.get("chief") and addresses.get("worker")):
        raise _tf_config_error("has parameter servers, which require a chief and workers")


def _parse_index(value: Any) -> int:
    # Some platforms write the index as a string. bool is a subclass of int.
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch("-?[0-9]{1,18}", text):
        raise _tf_config_error(f"has the task index {value!r}, which is not a whole number")
    return int(text)


def _tf_config_error(problem: str) -> UsageError:
    return UsageError(
        f"TF_CONFIG {problem}: fix it, or start the processes with ctl launch, which sets it."
    )
