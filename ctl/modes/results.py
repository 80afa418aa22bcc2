"""What `result.json` says of a run."""

import importlib.metadata
import logging
from typing import Any

import tensorflow as tf

from ctl.loop.controller import Controller
from ctl.loop.workdir import Workdir
from ctl.modes.experiment import Experiment

_PACKAGES = ("ctl", "tensorflow", "tf_keras", "tf-models-official", "numpy")


def is_complete(workdir: Workdir, reached: int, evaluates: bool) -> bool:
    """Whether a run that reached a step has nothing left to do."""
    result = workdir.result()
    return result.get("step") == reached and (not evaluates or bool(result.get("eval")))


def of_run(experiment: Experiment, controller: Controller, seconds: float) -> dict[str, Any]:
    """What a process that trained has to say, after so many seconds."""
    return {
        "step": controller.step,
        "train": controller.outputs,
        "eval": controller.evaluation if controller.evaluated_step == controller.step else None,
        "examples_per_second": controller.examples_per_second,
        "seconds": seconds,
        "strategy": experiment.hardware.name,
        "replicas": experiment.trainer.layout.replicas,
        "versions": _versions(),
    }


def of_training(workdir: Workdir) -> dict[str, Any]:
    """What an earlier process recorded of the training, for one that only evaluated."""
    kept = ("train", "examples_per_second")
    return {name: value for name, value in workdir.result().items() if name in kept}


def _versions() -> dict[str, str]:
    found = {"tensorflow": tf.__version__}
    for name in _PACKAGES:
        try:
            found.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            logging.getLogger("ctl").debug("%s is not installed as a package", name)
    return found
