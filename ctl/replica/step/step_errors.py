"""Turns TensorFlow's errors in an inner loop into one line."""

from collections.abc import Iterator
import contextlib
from typing import Any

import tensorflow as tf

from ctl.configs.error_location import user_line
from ctl.data.data_errors import report_data_errors
from ctl.data.input_pipeline import InputPipeline
from ctl.errors import UsageError
from ctl.replica.random import draws
from ctl.replica.step import out_of_memory, preprocessing
from ctl.replica.step.plan import Plan

_MERGE_CALL = "`merge_call` called while defining a new graph"  # of tf.distribute's own error


@contextlib.contextmanager
def report_errors(trainer: Any, plan: Plan, pipeline: InputPipeline) -> Iterator[None]:
    """Turns TensorFlow's errors about data, branches and memory into a UsageError of one line.

    Args:
        trainer: the `StandardTrainer`.
        plan: its resolved options.
        pipeline: its training data.

    Raises:
        UsageError: one of these errors was raised inside.
    """
    try:
        with (
            draws.report_problems(),
            preprocessing.report_problems(),
            report_data_errors("training", pipeline.element_spec),
        ):
            yield
    except tf.errors.OutOfRangeError:
        step = int(trainer.global_step.numpy())
        raise UsageError(
            f"The training data ended after step {step}: return at least one complete global batch of "
            "examples, or a dataset that repeats."
        ) from None
    except RuntimeError as error:
        if _MERGE_CALL not in str(error):
            raise
        raise UsageError(
            f"{user_line(error) or 'The step'} updates variables, or reduces over the replicas, in "
            "a branch or a loop that depends on a tensor, or in a tf.function of its own, which "
            "tf.distribute does not support on several replicas: select values by tf.where, or "
            "decide between two inner loops. To unfreeze a layer, set its trainable in "
            "train_loop_begin, after which ctl traces the step again."
        ) from error
    except tf.errors.ResourceExhaustedError as error:
        if not out_of_memory.is_out_of_memory(error):
            raise
        raise UsageError(out_of_memory.advice(plan, out_of_memory.measure(trainer))) from error
