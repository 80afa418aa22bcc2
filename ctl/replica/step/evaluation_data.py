"""Checks evaluation data without reading it, so that mistakes are reported before training."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ctl.configs.error_location import error_location
from ctl.data.autograph import traced
from ctl.data.features import flatten_features
from ctl.data.input_pipeline import InputPipeline
from ctl.errors import UsageError
from ctl.hardware import strategies


def check_splits(
    pipeline: InputPipeline,
    splits: Iterable[str],
    *,
    global_batch_size: int,
    strategy: tf.distribute.Strategy,
    step: Callable[[Any, Any], Any],
) -> None:
    """Checks the data of an evaluation.

    Args:
        pipeline: the data.
        splits: the splits to evaluate.
        global_batch_size: examples per step of the evaluation.
        strategy: the strategy of the evaluation.
        step: evaluates one replica's `(batch, row_mask)`.

    Raises:
        UsageError: a split never ends, or the model or the loss does not accept its features.
    """
    training = pipeline.element_spec()
    for split in splits:
        pipeline.evaluation_steps(global_batch_size, split)
        evaluation = pipeline.element_spec(split)
        # The first step of the training traces the same code with the same features.
        if evaluation == training or strategies.spec_of(strategy).coordinated:
            continue
        rows = pipeline.layout(global_batch_size).rows_per_replica
        spec = tf.nest.map_structure(
            lambda s, rows=rows: tf.TensorSpec([rows, *s.shape[1:]], s.dtype), evaluation
        )
        function = traced(lambda batch: strategy.run(step, (batch, None)))
        try:
            function.get_concrete_function(spec)  # traces the step and does not run it
        except Exception as error:
            kind = "evaluation" if split == "eval" else repr(split)
            raise UsageError(
                f"The {kind} examples are not like the training examples ("
                f"{_describe_differences(evaluation, training)}) and cannot be evaluated: "
                f"{error_location(error)}"
            ) from error


def _describe_differences(evaluation: dict[str, Any], training: dict[str, Any]) -> str:
    """Lists the features whose specs differ."""

    def show(spec: Any) -> str:
        if not isinstance(spec, tf.TensorSpec):
            return "missing" if spec is None else str(spec)
        return f"{spec.dtype.name} {spec.shape[1:]}"

    evaluation, training = flatten_features(evaluation), flatten_features(training)
    return "; ".join(
        f"{name} is {show(evaluation.get(name))} instead of {show(training.get(name))}"
        for name in sorted(evaluation.keys() | training.keys())
        if evaluation.get(name) != training.get(name)
    )
