"""Exports a trainer's and an evaluator's step as the HLO program that one TPU core would run."""

from collections.abc import Callable
import dataclasses
import itertools
import logging
from typing import Any

import tensorflow as tf

from ctl.built.inner_loop import pipeline_of, step_of
from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.hardware import quiet
from ctl.modes.aot_compile import problems
from ctl.modes.aot_compile.problems import NotExportable, Problem
from ctl.modes.aot_compile.strategy import SliceStrategy
from ctl.private.tensorflow import nest  # names the elements of a structure
from ctl.trainer import StandardTrainer


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one TPU core.

    Attributes:
        name: "train step" or "eval step".
        hlo: the program of one replica, a serialized HLO module.
        warnings: parts that compile, but may be slow.
    """

    name: str
    hlo: bytes
    warnings: list[Problem]


def export_train_step(trainer: StandardTrainer) -> Program:
    """Exports one training step, traced from the trainer's own `train_step`.

    If the step changes during the training, it is the last one, which needs the most memory.

    Args:
        trainer: a trainer made under a `SliceStrategy`.

    Raises:
        NotExportable: the step cannot be a TPU program.
    """
    data = pipeline_of(trainer).training_dataset(trainer.global_batch_size, start=0)
    step = step_of(trainer)
    last = max(step.changes(), default=0)
    step.begin(last)
    program = _export("train step", trainer.strategy, trainer.train_step, data.element_spec)
    if not last:
        return program
    note = f"the train step changes during the training: this is the one from step {last} on"
    return dataclasses.replace(program, warnings=[*program.warnings, Problem(note, fatal=False)])


def export_eval_step(evaluator: StandardEvaluator) -> Program:
    """Exports one evaluation step, as `export_train_step` exports a training step."""
    data = evaluator.eval_dataset
    return _export("eval step", evaluator.strategy, evaluator.eval_step, data.element_spec)


def _export(name: str, strategy: Any, step: Callable[[Any], Any], element_spec: Any) -> Program:
    assert isinstance(strategy, SliceStrategy)
    specs = dict(flatten_specs(element_spec))
    unknown = problems.check_shapes(specs)
    if unknown:
        raise NotExportable(unknown)
    strategy.traced.clear()
    _trace(step, element_spec, list(specs.values()))
    if len(strategy.traced) != 1:
        raise UsageError(
            f"The {name} calls strategy.run {len(strategy.traced)} times, but must be one program: "
            "call it exactly once in train_step."
        )
    traced = strategy.traced[0]
    graph = traced.function.get_concrete_function(*traced.specs).graph
    try:
        # Called on the function itself, which reuses the trace. The serialized form is used because the
        # text form is not stable between versions.
        export = traced.function.experimental_get_compiler_ir(*traced.specs)
        hlo = export(stage="hlo_serialized")
    except (ValueError, tf.errors.OpError) as error:
        raise NotExportable(problems.explain_export_error(error, graph)) from error
    in_graph = problems.find_in_graph(graph)
    fatal = [problem for problem in in_graph if problem.fatal]
    if fatal:
        raise NotExportable(fatal)
    return Program(name, hlo, in_graph)


def _trace(step: Callable[[Any], Any], element_spec: Any, specs: list[tf.TensorSpec]) -> None:
    def call(*tensors: tf.Tensor) -> None:
        step(itertools.repeat(pack_tensors(element_spec, tensors)))

    # TensorFlow logs a stack trace of what it cannot convert; the error is reported in one line.
    with quiet.hide_warnings(logging.CRITICAL):
        try:
            tf.function(call).get_concrete_function(*specs)
        except (UsageError, NotExportable):
            raise
        except Exception as error:  # the user's own code runs here
            raise NotExportable([problems.explain_tracing_error(error)]) from error


def flatten_specs(element_spec: Any) -> list[tuple[str, tf.TensorSpec]]:
    """Returns the name and the spec of each tensor of an element; skips a row mask that is None."""
    pairs = nest.flatten_with_joined_string_paths(element_spec, separator=".")
    return [(_feature_name(path), spec) for path, spec in pairs if isinstance(spec, tf.TensorSpec)]


def pack_tensors(element_spec: Any, tensors: Any) -> Any:
    """Packs tensors, in the order of `flatten_specs`, into an element."""
    remaining = iter(tensors)
    return tf.nest.map_structure(
        lambda spec: next(remaining) if isinstance(spec, tf.TensorSpec) else None, element_spec
    )


def _feature_name(path: str) -> str:
    """Returns a path such as "0.image" without the positions in tuples."""
    keys = [part for part in path.split(".") if not part.isdigit()]
    return ".".join(keys) or "the row mask"
