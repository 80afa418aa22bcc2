"""Builds the strategy, the trainer and the evaluator of a config."""

from collections.abc import Collection, Sequence
import dataclasses
import functools
import inspect
import os
import re

from ml_collections import config_dict
import tensorflow as tf

from ctl import errors, optimizers
from ctl.built.build import compare_workers
from ctl.built.inner_loop import pipeline_of, step_of
from ctl.configs import durations, group_values, keys, loading, overrides
from ctl.configs.option_keys import OPTION_KEYS
from ctl.configs.options import Section, TrainerOptions
from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions
from ctl.trainer import StandardTrainer

# Names of methods that other frameworks call -> what ctl has for them.
_OTHER_NAMES = {
    r"on_\w+_(begin|start|end)": "build_actions",
    r"train_loop_start": "train_loop_begin",
    r"(eval|validation|test)_step|eval_(begin|end|reduce)": "update_metrics or compute_metrics",
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment, built on this machine.

    Attributes:
        config: the config, with the global batch size resolved.
        hardware: the strategy, and why it was chosen.
        trainer: the trainer.
        evaluator: the evaluator; None in a mode that does not evaluate, and without `eval.splits`.
        optimizer: makes the config's optimizer; a trainer's `build_optimizer` may not have called it.
    """

    config: config_dict.ConfigDict
    hardware: selection.Hardware
    trainer: StandardTrainer
    evaluator: StandardEvaluator | None
    optimizer: optimizers.FromConfig

    @property
    def examples_per_epoch(self) -> int | None:
        """The number of training examples; None if it is not known."""
        # A trainer that a script has made got another optimizer than this one.
        known = self.optimizer.examples_per_epoch
        return known or pipeline_of(self.trainer).examples_per_epoch()

    @property
    def steps_per_epoch(self) -> float | None:
        """The steps in which every training example is read once; None if it is not known."""
        examples = self.examples_per_epoch
        return examples / self.trainer.global_batch_size if examples else None


def build(
    config: config_dict.ConfigDict,
    config_path: str,
    *,
    evaluates: bool = True,
    hardware: selection.Hardware | None = None,
) -> Experiment:
    """Builds an experiment. Writes nothing.

    Args:
        config: a validated config.
        config_path: the config file; the path of the trainer is relative to its folder.
        evaluates: whether to build the evaluator of `eval.splits`.
        hardware: the strategy; chosen by the config by default.

    Raises:
        UsageError: the config does not work with this trainer or on this machine.
    """
    trainer_class = loading.load_trainer_class(config.trainer, config_path, StandardTrainer)
    if config.runtime.deterministic:
        tf.config.experimental.enable_op_determinism()
    hardware = hardware or build_hardware(config.runtime)
    config = resolve_batch_size(config, hardware.strategy.num_replicas_in_sync)
    options = TrainerOptions.from_config(config)
    _check_class(trainer_class, config.trainer)
    optimizer = optimizers.FromConfig(functools.partial(resolve_durations, config))
    compare_workers("configs", hardware.strategy, config)
    trainer = trainer_class(
        strategy=hardware.strategy,
        global_batch_size=config.data.global_batch_size,
        optimizer=optimizer,
        options=options,
    )
    if not hasattr(trainer, "options"):
        raise UsageError(
            f"__init__ of {config.trainer} does not call super().__init__(**arguments)."
        )
    _check_optimizer_is_used(optimizer, config)
    step_of(trainer).add_models()
    config = resolve_durations(config, optimizer.examples_per_epoch)
    evaluator = None
    if evaluates and config.eval.splits:
        evaluator = StandardEvaluator(
            trainer,
            global_batch_size=config.eval.global_batch_size or None,
            splits=config.eval.splits,
        )
        evaluator.check_data()
        compare_workers("data", hardware.strategy, pipeline_of(trainer))
    _check_unread_keys(options, config, trainer_class)
    return Experiment(config, hardware, trainer, evaluator, optimizer)


def build_hardware(runtime: config_dict.ConfigDict) -> selection.Hardware:
    """Builds the strategy, as the section `runtime` of a config sets."""
    return selection.build(runtime.strategy, StrategyOptions.from_config(runtime, os.environ))


def resolve_batch_size(config: config_dict.ConfigDict, replicas: int) -> config_dict.ConfigDict:
    """Returns a locked copy of the config, with `data.global_batch_size` computed if necessary."""
    size = config.data.per_replica_batch_size
    resolved = {"data.global_batch_size": size * replicas, "data.per_replica_batch_size": 0}
    return overrides.with_values(config, resolved if size else {})


def resolve_durations(
    config: config_dict.ConfigDict, examples_per_epoch: int | None
) -> config_dict.ConfigDict:
    """Returns a locked copy of the config with every duration as a number of steps.

    Raises:
        UsageError: a duration cannot be resolved, or contradicts another key.
    """
    resolved = durations.resolve(config, examples_per_epoch=examples_per_epoch)
    with resolved.unlocked(), resolved.ignore_type():
        resolved.optimizer.groups = group_values.complete(resolved.optimizer.groups)
    keys.check_rules(overrides.flatten(resolved))
    return resolved


def _check_optimizer_is_used(
    optimizer: optimizers.FromConfig, config: config_dict.ConfigDict
) -> None:
    """Rejects keys of the optimizer that a trainer's own `build_optimizer` never reads."""
    if optimizer.called:
        return
    default, values = overrides.flatten(keys.defaults()), overrides.flatten(config)
    for key, value in values.items():
        # The trainer itself reads its options, whoever makes the optimizer.
        if not key.startswith("optimizer.") or key in OPTION_KEYS.values():
            continue
        if value != default.get(key):
            raise UsageError(
                f"{key} has no effect: build_optimizer of {config.trainer} never calls its argument; "
                "call it, or remove the key from the config."
            )


def _check_class(trainer_class: type, name: str) -> None:
    """Raises UsageError if the class lacks a method, or its `__init__` requires other arguments."""
    missing = sorted(getattr(trainer_class, "__abstractmethods__", ()))
    _check_spelling(trainer_class, name, missing)
    if missing:
        raise UsageError(f"{name} does not define {missing[0]}: define it.")
    arguments = ("strategy", "global_batch_size", "optimizer", "options")
    try:
        inspect.signature(trainer_class).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be constructed with {', '.join(arguments)} ({error}): let its __init__ "
            "accept **arguments only, pass them to super().__init__, and read further values from "
            "self.options.model."
        ) from None


def _check_spelling(trainer_class: type, name: str, missing: Sequence[str]) -> None:
    """Rejects a method named almost like one of ctl, or like one that other frameworks call.

    Such a method is accepted if a Python file of the trainer's folders mentions its name, if it
    overrides a method, and if the class that defines it also defines the method of ctl. In a notebook,
    whose cells are not known, only a missing method is looked for.

    Args:
        trainer_class: the class.
        name: the name of the class in messages.
        missing: the methods that it must define and does not.
    """
    hooks = [hook for hook, value in vars(StandardTrainer).items() if callable(value)]
    for index, cls in enumerate(trainer_class.__mro__, 1):
        if issubclass(StandardTrainer, cls) or cls.__module__.split(".")[0] in ("ctl", "orbit"):
            continue
        inherited = {method for base in trainer_class.__mro__[index:] for method in vars(base)}
        for own, value in vars(cls).items():
            if not callable(value) or own[0] == "_" or own in inherited | {*hooks}:
                continue
            meant = errors.closest(own, missing) or _find_meant(own, {*hooks} - {*vars(cls)})
            source = loading.read_trainer_source(trainer_class, folders=True) if meant else ""
            known = source or meant in missing
            if meant and known and not re.search(rf"(?<!def )\b{own}\b", source):
                raise UsageError(
                    f"{name} defines {own}: did you mean {meant}? If not, name it _{own}."
                )


def _find_meant(name: str, hooks: Collection[str]) -> str:
    """Returns the method of ctl that the name of a method stands for; "" if there is none."""
    for pattern, meant in _OTHER_NAMES.items():
        if re.fullmatch(pattern, name):
            return meant
    return next((hook for hook in sorted(hooks) if _is_typo(name, hook)), "")


def _is_typo(name: str, hook: str) -> bool:
    """Returns whether a name is a misspelt one, and not a variant such as build_model2."""
    if name.rstrip("0123456789_") == hook:
        return False
    return sorted(name) == sorted(hook) or bool(errors.closest(name, [hook], similarity=0.9))


def _check_unread_keys(
    options: TrainerOptions, config: config_dict.ConfigDict, trainer_class: type
) -> None:
    """Rejects keys that the config sets but the trainer never reads, since they have no effect."""
    default = overrides.flatten(keys.defaults())
    values = overrides.flatten(config)
    assert isinstance(options.data, Section) and isinstance(options.model, Section)
    unread = [k for k in options.data.unread() if values[k] != default[k]] + options.model.unread()
    # The step reads keys only when it is traced, so a key that the source mentions counts as read; a
    # call of ctl.recompute is no mention of model.recompute.
    source = loading.read_trainer_source(trainer_class)
    unread = [k for k in unread if not re.search(rf"(?<!ctl\.)\b{k.rpartition('.')[-1]}\b", source)]
    if unread:
        raise UsageError(
            f"{unread[0]} has no effect: {config.trainer} never reads self.options.{unread[0]}; "
            "remove the key from the config, or read it."
        )
