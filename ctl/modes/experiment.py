"""A checked config -> strategy, trainer and evaluator."""

import dataclasses
import os
import re

from ml_collections import config_dict
import tensorflow as tf

from ctl import optimizers
from ctl.configs import loading
from ctl.configs.options import Clip, Section, TrainerOptions
from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.hardware import devices, selection
from ctl.hardware.strategies import StrategyOptions
from ctl.trainer import StandardTrainer


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a config comes to on this machine.

    Attributes:
        config: with the global batch size filled in.
        hardware: the strategy and why.
        trainer: the trainer.
        evaluator: the evaluator, for the modes that evaluate.
    """

    config: config_dict.ConfigDict
    hardware: selection.Hardware
    trainer: StandardTrainer
    evaluator: StandardEvaluator | None


def build(
    config: config_dict.ConfigDict,
    config_path: str,
    *,
    evaluates: bool = True,
    hardware: selection.Hardware | None = None,
) -> Experiment:
    """Builds everything, and writes nothing.

    Args:
        config: a checked config.
        config_path: the file that it is from, which the trainer's path is relative to.
        evaluates: whether the evaluation data is needed.
        hardware: what to build it for, in place of what the config asks for.

    Raises:
        UsageError: the config cannot be right with this trainer or on this machine.
    """
    cls = loading.trainer_class(config.trainer, config_path, StandardTrainer)
    if config.runtime.deterministic:
        tf.config.experimental.enable_op_determinism()
    hardware = hardware or _hardware(config.runtime)
    config = resolved(config, hardware.strategy.num_replicas_in_sync)
    options = trainer_options(config)
    trainer = cls(
        strategy=hardware.strategy,
        global_batch_size=config.data.global_batch_size,
        optimizer=optimizers.factory(
            config.optimizer,
            global_batch_size=config.data.global_batch_size,
            steps=config.train.steps,
            jit=config.runtime.xla != "off",
        ),
        options=options,
    )
    evaluator = None
    if evaluates:
        size = config.eval.global_batch_size or None
        evaluator = StandardEvaluator(trainer, global_batch_size=size)
        trainer.feed.data("eval")
    _refuse_unread(options, config, cls)
    return Experiment(config, hardware, trainer, evaluator)


def _hardware(runtime: config_dict.ConfigDict) -> selection.Hardware:
    devices.limit_gpu_memory(
        growth=runtime.gpu.memory_growth, limit_mib=runtime.gpu.memory_limit_mib
    )
    return selection.build(runtime.strategy, StrategyOptions.from_config(runtime, os.environ))


def resolved(config: config_dict.ConfigDict, replicas: int) -> config_dict.ConfigDict:
    """A copy of the config with the global batch size filled in."""
    config = config_dict.ConfigDict(config.to_dict())
    if config.data.per_replica_batch_size:
        config.data.global_batch_size = config.data.per_replica_batch_size * replicas
        config.data.per_replica_batch_size = 0
    return config.lock()


def trainer_options(config: config_dict.ConfigDict) -> TrainerOptions:
    """The trainer's options that a resolved config holds."""
    data = {"dir": config.data.dir, "tfrecord": config.data.tfrecord.to_dict()}
    return TrainerOptions(
        seed=config.seed,
        precision=config.runtime.precision,
        loss_scale=config.runtime.loss_scale,
        xla=config.runtime.xla,
        placement=config.data.placement,
        logical_shards=config.runtime.logical_shards,
        all_reduce_dtype=config.runtime.all_reduce.dtype,
        gradient_accumulation_steps=config.optimizer.gradient_accumulation_steps,
        clip=Clip(**config.optimizer.clip.to_dict()),
        on_non_finite=config.train.on_non_finite,
        loss_spike=config.train.loss_spike,
        norms=config.train.norms,
        prefetch=config.data.prefetch,
        data=Section(data, "data"),
        model=Section(config.model.to_dict(), "model"),
    )


def _refuse_unread(options: TrainerOptions, config: config_dict.ConfigDict, cls: type) -> None:
    """Refuses keys that this experiment sets and its trainer never reads: they have no effect."""
    from ctl.configs import defaults, overrides

    default = overrides.flat(defaults.defaults())
    values = overrides.flat(config)
    assert isinstance(options.data, Section) and isinstance(options.model, Section)
    unread = [k for k in options.data.unread() if values[k] != default[k]] + options.model.unread()
    # What the step reads while it runs is not read yet.
    source = loading.trainer_source(cls)
    unread = [k for k in unread if not re.search(rf"\b{k.rpartition('.')[-1]}\b", source)]
    if unread:
        raise UsageError(
            f"{unread[0]} has no effect: {config.trainer} never reads self.options.{unread[0]}; take "
            "the key out of the config, or read it."
        )
