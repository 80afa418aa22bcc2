"""The condition of an update: `minimize(..., when=condition)`, in place of an `if` around it."""

from typing import Any

import tensorflow as tf

from ctl.errors import UsageError, type_name
from ctl.graphs.dataflow import ancestors
from ctl.hardware import strategies
from ctl.rows.assertions import require
from ctl.rows.row_mask import Rows
from ctl.rows.trace import symbolic

_FIX = "compute it from global_step, from a loss of a step, or from ctl.replica.all_gather"


def check(when: Any, rows: Rows) -> tf.Tensor:
    """Returns a condition; call it in a replica context.

    Raises:
        UsageError: it is no scalar bool of the step, or may differ between the replicas, or the devices
            cannot leave an update out.
    """
    is_tensor = tf.is_tensor(when)
    if not is_tensor or when.dtype != tf.bool or when.shape.rank != 0:
        found = f"{when.dtype.name} {when.shape}" if is_tensor else type_name(when)
        raise UsageError(
            f"when is {found}, but must be a scalar tensor of bools, such as self.global_step % 5 == 0: "
            "a value of Python stays as it was when the step was traced."
        )
    spec = strategies.spec_of(tf.distribute.get_strategy())
    if spec.tpu or spec.coordinated:
        raise UsageError(
            "when requires that an update can be left out, which TPUs and the workers of parameter "
            "servers cannot: select by tf.where in the loss, or train in another inner loop."
        )
    known = {id(value.output) for value in rows.trace.global_values}
    own = {id(each) for each in symbolic(rows.trace.inputs)}
    is_split = tf.distribute.get_replica_context().num_replicas_in_sync > 1
    is_split = is_split and not getattr(when, "_ctl_agreed", False)
    if is_split and any(id(each) in own for each in ancestors(when, stop=known)):
        raise UsageError(
            f"when depends on the rows of a replica, but must be the same on all replicas: {_FIX}."
        )
    return when


def agreed(when: Any) -> tf.Tensor:
    """Returns the condition of a step in the user's own `strategy.run`, where it is compared.

    There it is not known which values are those of the global batch.
    """
    context = tf.distribute.get_replica_context()
    count = context.num_replicas_in_sync
    if count == 1:
        return tf.convert_to_tensor(when)
    given = tf.cast(when, tf.float32)
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, given)
    problem = (
        f"when is True on {{}} of {count} replicas, but must be the same on all of them: {_FIX}."
    )
    is_same = tf.logical_or(tf.equal(total, 0), tf.equal(total, count))
    result = require(is_same, given, problem, lambda: [total]) > 0
    result._ctl_agreed = True
    return result
