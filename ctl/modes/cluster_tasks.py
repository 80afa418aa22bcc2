"""The processes of TF_CONFIG that do not train: evaluators, and the workers and servers of a chief."""

from collections.abc import Mapping
import json
import os
import time
from typing import Any

from ctl.configs import keys
from ctl.configs.modes import MODES, Mode
from ctl.errors import Failure, UsageError, print_line
from ctl.hardware import engines, rendezvous
from ctl.hardware.quiet import hold_back_stderr
from ctl.hardware.strategies import StrategyOptions
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, Arguments

_POLL_SECONDS = 0.5


def is_evaluator(environment: Mapping[str, str]) -> bool:
    """Returns whether the task of this process in TF_CONFIG is "evaluator"."""
    text = environment.get("TF_CONFIG", "").strip()
    # Parsed again for its role: there is no cluster to return for an evaluator.
    is_single = bool(text) and engines.from_environment(environment) is None
    task = json.loads(text).get("task") if is_single else None
    return isinstance(task, dict) and task.get("type") == "evaluator"


def choose_mode(name: str, config: Any, environment: Mapping[str, str], *, fresh: bool) -> Mode:
    """Returns the mode of this process, and adapts the config of an evaluator.

    The evaluator takes no part in the reductions of the others, so the options of their strategy are
    replaced by the defaults.

    Args:
        name: the value of --mode, with which all processes of the run are started.
        config: the checked config.
        environment: variables of the process.
        fresh: whether --fresh is set.

    Raises:
        UsageError: --fresh is set for an evaluator.
    """
    mode = MODES[name]
    if not mode.builds_strategy or not is_evaluator(environment):
        return mode
    initial = keys.defaults().runtime
    for key in ("strategy", "all_reduce", "cluster"):
        config.runtime[key] = initial[key]
    if mode.workdir != "resumed":
        return mode
    if fresh:
        raise UsageError(
            "The evaluator of TF_CONFIG cannot be started with --fresh, because it might evaluate the "
            "run that the other processes move aside: start it without this flag."
        )
    print_line("This process is the evaluator of TF_CONFIG: it runs --mode=continuous_eval.")
    return MODES["continuous_eval"]


def wait_for_run(workdir: Workdir, *, timeout: float) -> None:
    """Waits until the other processes have created the run.

    Args:
        workdir: the folder of the run.
        timeout: seconds to wait.

    Raises:
        Failure: the run does not exist after that time.
    """
    end = time.monotonic() + timeout
    while not workdir.has_run():
        workdir.sync()
        if time.monotonic() > end:
            raise Failure(
                f"The evaluator has waited {timeout:.0f} s for a run in {workdir.path}: start the other "
                "processes with the same --workdir, or increase runtime.cluster.start_timeout."
            )
        time.sleep(_POLL_SECONDS)


_PING_SECONDS = 1.0
_MAX_MISSED_PINGS = 10  # a short interruption of the network must not end the process


def run_server(arguments: Arguments) -> int:
    """Runs TensorFlow's server until the chief has ended.

    The server has no method that waits for the end of the chief (`Server.join` never returns), so this
    process polls the chief's port.

    Returns:
        The exit code: stopped if the run was not complete by then, so that it is started again.
    """
    import tensorflow as tf

    from ctl.modes import results

    options = StrategyOptions.from_config(arguments.config.runtime, os.environ)
    cluster = options.cluster
    assert cluster is not None
    rendezvous.wait_for_others(cluster, timeout=options.start_timeout)
    with hold_back_stderr():  # gRPC logs each connection
        server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster.spec()), job_name=cluster.role, task_index=cluster.index
        )
        print_line(f"{cluster.name} serves at {server.target.removeprefix('grpc://')}.")
        missed_pings = 0
        while missed_pings < _MAX_MISSED_PINGS:
            time.sleep(_PING_SECONDS)
            reachable = rendezvous.is_listening(cluster.addresses["chief"][0])
            missed_pings = 0 if reachable else missed_pings + 1
    # A dry run is not repeated, whatever its result: the chief reports it.
    return DONE if arguments.dry_run or results.has_ended(arguments.workdir) else STOPPED
