"""The mode of this process: an evaluator of TF_CONFIG has another one than the processes that train."""

from collections.abc import Mapping
import json
import time
from typing import Any

from ctl.configs import keys
from ctl.configs.modes import MODES, Mode
from ctl.errors import Failure, UsageError, print_line
from ctl.hardware import engines
from ctl.loop.workdir import Workdir

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
