"""Orders the parts of a step, so that their activations need not exist at the same time.

The graph of a step fixes the order of two operations only if one uses the result of the other.
Otherwise TensorFlow may run the forward passes of all micro-batches before the first backward pass, or
a recomputation right after the pass that it repeats.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

import tensorflow as tf

from ctl.private.tensorflow import gen_xla_ops


@contextlib.contextmanager
def run_after(earlier: Sequence[Any], values: Any, *, compiled: bool) -> Iterator[Any]:
    """Makes the code inside the `with` block run after other tensors are computed.

    Args:
        earlier: tensors and `tf.IndexedSlices` that are computed first; None is ignored.
        values: nested tensors that the code inside reads; None is allowed.
        compiled: whether XLA compiles the code. It ignores control dependencies, and may move or merge
            what does not depend on `values`.

    Yields:
        `values`, to be used inside of the block instead of the originals.
    """
    first = [x for x in tf.nest.flatten(earlier, expand_composites=True) if tf.is_tensor(x)]
    if not first or tf.executing_eagerly():  # eager operations run in the order of the code
        yield values
    elif compiled:
        # Documented at https://www.tensorflow.org/xla/operation_semantics#optimizationbarrier: no
        # output is available before every input is, and no pass moves an operation across it. It
        # supports no dynamic shapes, such as those of the gradients of rows that tf.unique selects.
        first = [x for x in first if x.shape.is_fully_defined()] or first
        flat = tf.nest.flatten(values, expand_composites=True)
        places = [i for i, x in enumerate(flat) if tf.is_tensor(x) and x.dtype != tf.string]
        outputs = gen_xla_ops.xla_optimization_barrier(input=[*(flat[i] for i in places), *first])
        for i, output in zip(places, outputs[: len(places)], strict=True):
            output.set_shape(flat[i].shape)
            flat[i] = output
        yield tf.nest.pack_sequence_as(values, flat, expand_composites=True)
    else:
        # Every operation that uses no other operation of the block gets a control input, even if it
        # uses no value, such as the zeros that a recurrent layer starts from.
        with tf.control_dependencies(first):
            yield tf.nest.map_structure(
                lambda x: tf.identity(x) if tf.is_tensor(x) else x, values, expand_composites=True
            )
