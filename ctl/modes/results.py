"""Computes the entries of result.json."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ctl.built.inner_loop import plan_of
from ctl.hardware import host
from ctl.loop import json_files
from ctl.loop.controller import Controller
from ctl.loop.workdir import Workdir
from ctl.modes.experiment import Experiment
from ctl.version import versions

# A run that an action has ended continues if one of these keys changes.
_KEYS_OF_STOPS = ("train.best.", "train.max_duration:", "eval.", "actions:")


def is_complete(
    workdir: Workdir, step: int, *, steps: int, evaluates: bool, changes: Sequence[str]
) -> bool:
    """Returns whether a run has nothing left to do.

    A run that was killed after its last checkpoint is not complete, even if another process has since
    evaluated that checkpoint and recorded it in the result.

    Args:
        workdir: the folder of the run.
        step: the step of its last checkpoint.
        steps: the step to train to.
        evaluates: whether it must have been evaluated.
        changes: one line for each change of the config, "key: old -> new".
    """
    result = workdir.result()
    stopped = bool(result.get("stopped")) and not changes_stop(changes)
    is_last = result.get("step") == step and (step >= steps or stopped)
    return is_last and (not evaluates or bool(result.get("eval"))) and has_ended(workdir)


def changes_stop(changes: Sequence[str]) -> bool:
    """Returns whether a run that an action has ended continues with these changes of the config."""
    return any(line.startswith(_KEYS_OF_STOPS) for line in changes)


def has_ended(workdir: Workdir) -> bool:
    """Returns whether the last process that trained in the folder has reached the end of the run.

    Early stopping or a time limit may have ended it, so the step does not show it.
    """
    lines = json_files.read_lines(workdir.path / "events.jsonl", event=str)
    events = [line["event"] for line in lines]
    lives = [event for event in events if event in ("start", "resume", "end", "stop")]
    return lives[-1:] == ["end"]


def make_result(experiment: Experiment, controller: Controller, seconds: float) -> dict[str, Any]:
    """Makes the result of a process that trained for `seconds`."""
    stopped = controller.actions.stop_reason
    trained = controller.trained_step
    step = controller.step if trained is None else trained
    return {
        "step": step,
        "train": controller.outputs,
        "eval": controller.evaluation if controller.evaluated_step == controller.step else None,
        "examples_per_second": controller.reporter.throughput.examples_per_second,
        "seconds": seconds,
        "strategy": experiment.hardware.name,
        "replicas": plan_of(experiment.trainer).layout.replicas,
        "versions": versions(),
        "host": host.describe_kernels(tf.config.threading.get_intra_op_parallelism_threads()),
        **({"stopped": stopped} if stopped else {}),
        **controller.actions.results(),
    }


def read_training(workdir: Workdir) -> dict[str, Any]:
    """Reads the training results of an earlier process, for one that only evaluated."""
    names = ("train", "examples_per_second", "flops_per_step", "model_flops_utilization")
    return {name: value for name, value in workdir.result().items() if name in names}
