"""Makes the experiment of a trainer that a script has made."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl import optimizers
from ctl.configs import overrides
from ctl.configs.keys import OPTION_KEYS
from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.hardware.selection import Hardware
from ctl.modes.experiment import Experiment
from ctl.trainer import StandardTrainer

_SEVERAL_PROCESSES = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.ParameterServerStrategy,
)


def make_experiment(trainer: StandardTrainer) -> Experiment:
    """Makes an experiment whose config records what is known about the trainer.

    Raises:
        UsageError: the trainer runs in several processes.
    """
    cls, optimizer = type(trainer), trainer.optimizer
    if isinstance(trainer.strategy, _SEVERAL_PROCESSES):
        raise UsageError(
            f"ctl.Run trains in one process, but the trainer has a {type(trainer.strategy).__name__}: "
            "train with python -m ctl.launch."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config = overrides.config(
        trainer=f"{cls.__module__}:{cls.__qualname__}",
        data=dict(global_batch_size=trainer.global_batch_size),
        model=_to_dict(trainer.options.model),
    )
    with config.ignore_type():
        for option, key in OPTION_KEYS.items():
            section: Any = config
            *path, name = key.split(".")
            for part in path:
                section = section[part]
            section[name] = getattr(trainer.options, option)
        config.optimizer.name = f"{type(inner).__module__}:{type(inner).__name__}"
        if not callable(inner._learning_rate):
            config.optimizer.learning_rate = float(inner.learning_rate.numpy())
    hardware = Hardware(trainer.strategy, type(trainer.strategy).__name__, "the trainer's own")
    make: Callable[[int | None], Any] = lambda examples: config  # noqa: E731 - never called
    return Experiment(
        config, hardware, trainer, StandardEvaluator(trainer), optimizers.FromConfig(make)
    )


def _to_dict(section: Any) -> dict[str, Any]:
    return {k: _to_dict(v) if hasattr(v, "items") else v for k, v in section.items()}
