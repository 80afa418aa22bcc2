"""The inner loop as one XLA program of many steps: `runtime.xla=loop`."""

from collections.abc import Callable
import math
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.data.input_pipeline import InputPipeline
from ctl.hardware import devices
from ctl.replica.arithmetic.waits import InputWait
from ctl.replica.step.microbatches import Batch
from ctl.replica.step.plan import Plan

# Three chunks are in memory at a time: one in use, one in transfer, one in preparation.
CHUNK_BYTES = 256 * 2**20
MAX_STEPS = 512


class CompiledLoop:
    """Runs any number of steps over chunks of batches; Orbit calls it as an inner loop.

        loop = CompiledLoop(step, strategy=strategy, size=100, input_wait=InputWait(strategy))
        loop(iter(chunks), tf.constant(250))        # two chunks and a half; the rest is kept

    The length of a chunk depends on memory, not on the length of an inner loop. The number of steps
    is an argument of the one program, so that a shorter last loop is not compiled again.

    The first call compiles the program.

    Args:
        step: runs one replica's step on a batch and counts it.
        strategy: a strategy with one replica.
        size: steps per chunk.
        input_wait: measures how long the loop waits for chunks.
    """

    def __init__(
        self,
        step: Callable[[Any], None],
        *,
        strategy: tf.distribute.Strategy,
        size: int,
        input_wait: InputWait,
    ):
        self.size = size
        self._step = step
        self._strategy = strategy
        self._input_wait = input_wait
        self._chunk: Any = None
        self._used = size
        # The trip count is an argument, not a Python int, so that one program serves all lengths.
        self.compile_again()

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> None:
        """Runs steps.

        Args:
            iterator: yields chunks, tensors of shape [size, ...].
            num_steps: scalar, the number of steps.
        """
        remaining = int(num_steps)
        while remaining:
            if self._used == self.size:
                self._chunk, self._used = self._input_wait.next(iterator), 0
            steps = min(remaining, self.size - self._used)
            # Passes the complete chunk and a start: each length of a slice would be compiled.
            arguments = (self._chunk, tf.constant(self._used), tf.constant(steps))
            self._strategy.run(self._program, args=arguments)
            self._used += steps
            remaining -= steps

    def compile_again(self) -> None:
        """Drops the compiled program, so that the next call traces the step and compiles it."""
        self._program = traced(self._run_steps, jit_compile=True)

    def discard_chunk(self) -> None:
        """Drops the rest of the current chunk, because the data moves to another step."""
        self._chunk, self._used = None, self.size

    def _run_steps(self, chunk: Any, start: tf.Tensor, steps: tf.Tensor) -> None:
        def run_step(i: tf.Tensor) -> tuple[tf.Tensor]:
            # Not `values[start + i]`: XLA takes the bounds of slices for constants, and would compile
            # a program for each start.
            self._step(tf.nest.map_structure(lambda values: tf.gather(values, start + i), chunk))
            return (i + 1,)

        # XLA compiles the loop into the program.
        tf.while_loop(lambda i: i < steps, run_step, [tf.constant(0)])


def compile_loop(
    step: Callable[[Batch, Any], tf.Tensor],
    *,
    plan: Plan,
    pipeline: InputPipeline,
    strategy: tf.distribute.Strategy,
    global_step: tf.Variable,
    input_wait: InputWait,
) -> CompiledLoop:
    """Returns an inner loop as one XLA program.

    Args:
        step: runs one replica's step on a batch and its row mask.
        plan: the resolved options.
        pipeline: the data.
        strategy: a strategy with one replica.
        global_step: counts the steps.
        input_wait: measures how long the loop waits for chunks.
    """
    resident = None
    if plan.options.placement == "device":
        device = devices.replica_devices(strategy)[0]
        resident = pipeline.copy_to_device(device)
    spec = tf.TensorSpec([None], tf.int64) if resident else pipeline.element_spec()

    # No mask: one replica computes every row of a full batch, and chunks contain full batches only.
    def counted_step(batch: Batch) -> None:
        step(resident.gather(batch["index"]) if resident else batch, None)
        global_step.assign_add(1)

    size = chunk_size(spec, plan.layout.global_batch_size)
    return CompiledLoop(counted_step, strategy=strategy, size=size, input_wait=input_wait)


def chunk_size(spec: Any, rows: int) -> int:
    """Returns the number of steps per chunk: as many as fit into `CHUNK_BYTES`, at most `MAX_STEPS`.

    Args:
        spec: `tf.TensorSpec`s of a batch, [rows, ...] each.
        rows: rows per batch.
    """
    row_bytes = sum(
        math.prod(n or 1 for n in feature.shape[1:].as_list()) * feature.dtype.size
        for feature in tf.nest.flatten(spec)
    )
    return max(1, min(MAX_STEPS, CHUNK_BYTES // max(1, row_bytes * rows)))
