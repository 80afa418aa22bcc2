"""Explains TensorFlow's errors about the end of the data, branches and XLA in a training loop."""

import re

import tensorflow as tf

from ctl.built.inner_loop import InnerLoop
from ctl.configs.error_location import user_line

_MERGE_CALL = "`merge_call` called while defining a new graph"  # of tf.distribute's own error
_NO_GRADIENT = re.compile(r"gradient registry has no entry for: (\w+)")
_OF_CONTEXT = re.compile(
    r"'NoneType' object has no attribute "
    r"'(replica_id_in_sync_group|num_replicas_in_sync|all_reduce|all_gather|merge_call)'"
)
# A line of the user in AutoGraph's error, and the messages of Python and TensorFlow.
_STATIC_ROWS = re.compile(r"\n\s.*\.shape\b"), re.compile(r"NoneType|elements of \[None")
_CALLED = re.compile(r"""Exception encountered when calling (?:layer )?["']([^"']+)["']""")
# Of XLA's own errors.
_NO_BOUND = "requires a fixed tensor list size"
_NOT_DETERMINISTIC = "do not yet have a deterministic XLA implementation"


def explain(error: BaseException, loop: InnerLoop | None) -> str:
    """Explains an error of a trainer's loop in one line; "" for other errors, and without a loop."""
    if isinstance(error, AttributeError) and (attribute := _OF_CONTEXT.search(str(error))):
        layer = _CALLED.search(str(error))
        place = user_line(error) or (f"The call of layer {layer[1]}" if layer else "The model")
        return (
            f"{place} uses {attribute[1]} of tf.distribute."
            "get_replica_context(), which is None while ctl builds the model: write ctl.replica."
            "positions(x) for the places of the rows in the global batch, ctl.replica.all_gather(x) for "
            "all rows, or use the context only if it is not None."
        )
    if isinstance(error, TypeError | ValueError) and all(
        pattern.search(str(error)) for pattern in _STATIC_ROWS
    ):
        return (
            f"{user_line(error) or 'The step'} computes with a static number of rows, which partial "
            "batches do not have: use tf.shape(x)[0], or batches of one size."
        )
    if missing := _NO_GRADIENT.search(str(error)):
        return (
            f"TensorFlow has no gradient for the operation {missing[1]}, through which the losses "
            "depend on the variables: compute them by other operations, or apply tf.stop_gradient to "
            "what it computes."
        )
    if loop is None:
        return ""
    if isinstance(error, tf.errors.OutOfRangeError):
        return (
            f"The training data ended after step {int(loop.trainer.global_step.numpy())}: return at "
            "least one complete global batch of examples, or a dataset that repeats."
        )
    if isinstance(error, RuntimeError) and _MERGE_CALL in str(error):
        return (
            f"{user_line(error) or 'The step'} updates variables, or reduces over the replicas, in a "
            "branch or a loop that depends on a tensor, or in a tf.function of its own, which "
            "tf.distribute does not support on several replicas: select values by tf.where, or decide "
            "between two inner loops. To unfreeze a layer, set its trainable in train_loop_begin, "
            "after which ctl traces the step again."
        )
    if isinstance(error, tf.errors.InvalidArgumentError | tf.errors.UnimplementedError):
        reason = explain_xla(error)
        return reason and f"{reason}, or choose runtime.xla=off."
    return ""


def explain_xla(error: BaseException) -> str:
    """Explains an error of XLA that does not name what to change; "" for other errors."""
    before, *after = str(error).split(_NOT_DETERMINISTIC)
    if after:
        operations = before.splitlines()[-1].strip()
        return f"{operations} {_NOT_DETERMINISTIC}, so runtime.deterministic must be false"
    if _NO_BOUND not in str(error):
        return ""
    return (
        "XLA cannot compile the gradient of a tf.while_loop without a bound: pass maximum_iterations "
        "(tf.autograph.experimental.set_loop_options sets it for a Python loop)"
    )
