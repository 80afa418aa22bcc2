"""What result.json records of a run."""

import importlib.metadata
import logging
from typing import Any

import tensorflow as tf

from ctl.loop.controller import Controller
from ctl.loop.workdir import Workdir
from ctl.modes.experiment import Experiment
from ctl.replica.engine import engine_of

_PACKAGES = ("ctl", "tensorflow", "tf_keras", "tf-models-official", "numpy")


def is_complete(workdir: Workdir, step: int, evaluates: bool) -> bool:
    """Whether a run whose last checkpoint is at its last step has nothing left to do.

    The result is written last, so a run that was killed before has no result of that step.
    """
    result = workdir.result()
    return result.get("step") == step and (not evaluates or bool(result.get("eval")))


def make_result(experiment: Experiment, controller: Controller, seconds: float) -> dict[str, Any]:
    """Makes the result of a process that trained for `seconds`."""
    return {
        "step": controller.step,
        "train": controller.outputs,
        "eval": controller.evaluation if controller.evaluated_step == controller.step else None,
        "examples_per_second": controller.examples_per_second,
        "seconds": seconds,
        "strategy": experiment.hardware.name,
        "replicas": engine_of(experiment.trainer).plan.layout.replicas,
        "versions": _versions(),
    }


def read_training(workdir: Workdir) -> dict[str, Any]:
    """Reads what an earlier process recorded of the training, for one that only evaluated."""
    names = ("train", "examples_per_second")
    return {name: value for name, value in workdir.result().items() if name in names}


def _versions() -> dict[str, str]:
    # TensorFlow's package has another name on each kind of hardware: tensorflow_cpu, tensorflow_tpu.
    versions = {"tensorflow": tf.__version__}
    for name in _PACKAGES:
        try:
            versions.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            logging.getLogger("ctl").debug("%s is not installed as a package", name)
    return versions
