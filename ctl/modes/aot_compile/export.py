"""A trainer and an evaluator -> the programs, as HLO, that one core of a TPU would run."""

from collections.abc import Callable
import dataclasses
import logging
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.modes.aot_compile import problems
from ctl.modes.aot_compile.problems import Problem, Unfit
from ctl.modes.aot_compile.strategy import SliceStrategy
from ctl.trainer import StandardTrainer


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: "train step" or "eval step".
        hlo: a serialized HLO module of one replica.
        warnings: what compiles, and may be slow.
    """

    name: str
    hlo: bytes
    warnings: list[Problem]


def train_step(trainer: StandardTrainer) -> Program:
    """The program of one training step, made by the trainer's own `train_step`.

    Args:
        trainer: made under a `SliceStrategy`.

    Raises:
        Unfit: it cannot be a program of a TPU.
    """
    data = trainer.feed.training(trainer.global_batch_size, start=0)
    return _program("train step", trainer.strategy, trainer.train_step, data.element_spec)


def eval_step(evaluator: StandardEvaluator) -> Program:
    """The program of one evaluation step; as `train_step`."""
    data = evaluator.eval_dataset
    return _program("eval step", evaluator.strategy, evaluator.eval_step, data.element_spec)


def _program(name: str, strategy: Any, step: Callable[[Any], Any], element: Any) -> Program:
    assert isinstance(strategy, SliceStrategy)
    specs = {_name(path): spec for path, spec in _flat(element)}
    unknown = problems.unknown_sizes(specs)
    if unknown:
        raise Unfit(unknown)
    strategy.traced.clear()
    _trace(step, element, list(specs.values()))
    if len(strategy.traced) != 1:
        raise UsageError(
            f"The {name} calls strategy.run {len(strategy.traced)} times: want one program, so call "
            "it once in train_step."
        )
    traced = strategy.traced[0]
    graph = traced.function.get_concrete_function(*traced.specs).graph
    try:
        # Of the function itself: the same trace, and the text form breaks between versions.
        export = traced.function.experimental_get_compiler_ir(*traced.specs)
        hlo = export(stage="hlo_serialized")
    except (ValueError, tf.errors.OpError) as error:
        raise Unfit(problems.of_export(error, graph)) from error
    found = problems.in_graph(graph)
    fatal = [problem for problem in found if problem.fatal]
    if fatal:
        raise Unfit(fatal)
    return Program(name, hlo, found)


def _trace(step: Callable[[Any], Any], element: Any, specs: list[tf.TensorSpec]) -> None:
    def call(*tensors: tf.Tensor) -> None:
        step(_One(_packed(element, tensors)))

    # TensorFlow logs the stack of what it cannot convert, which is told in one line instead.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        tf.function(call).get_concrete_function(*specs)
    except (UsageError, Unfit):
        raise
    except Exception as error:  # a person's own code runs here
        raise Unfit([problems.of_tracing(error)]) from error
    finally:
        logger.setLevel(level)


class _One:
    """An iterator of one element, in the place of the strategy's."""

    def __init__(self, element: Any):
        self._element = element

    def __iter__(self) -> "_One":
        return self

    def __next__(self) -> Any:
        return self._element


def _flat(element: Any) -> list[tuple[tuple, tf.TensorSpec]]:
    """The tensors of an element and where they are in it; a mask that is not there is left out."""
    pairs = zip(_paths(element), tf.nest.flatten(element), strict=True)
    return [(path, spec) for path, spec in pairs if isinstance(spec, tf.TensorSpec)]


def _packed(element: Any, tensors: Any) -> Any:
    left = iter(tensors)
    return tf.nest.map_structure(
        lambda spec: next(left) if isinstance(spec, tf.TensorSpec) else None, element
    )


def _paths(element: Any, path: tuple = ()) -> list[tuple]:
    if isinstance(element, dict):
        return [p for key in sorted(element) for p in _paths(element[key], (*path, key))]
    if isinstance(element, tuple | list):
        return [p for i, value in enumerate(element) for p in _paths(value, (*path, i))]
    return [path]


def _name(path: tuple) -> str:
    words = [str(part) for part in path if isinstance(part, str)]
    return ".".join(words) or "the mask of present rows"
