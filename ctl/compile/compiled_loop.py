"""The inner loop as one XLA program of many steps: `runtime.xla=loop`."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import tensorflow as tf

from ctl.data.autograph import traced
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import Nest
from ctl.hardware import devices
from ctl.rows import replicas
from ctl.rows.waits import InputWait
from ctl.update.microbatches import Batch, unpack
from ctl.update.plan import Plan

# Three chunks are in memory at a time: one in use, one in transfer, one in preparation.
CHUNK_BYTES = 256 * 2**20
MAX_STEPS = 512


@dataclasses.dataclass(eq=False)
class CompiledLoop:
    """Runs any number of steps over chunks of batches; Orbit calls it as an inner loop.

        loop = CompiledLoop(step, strategy=strategy, most=512, input_wait=InputWait(strategy))
        loop.fit(100)                               # a chunk has 500 batches
        loop(iter(chunks), tf.constant(100))        # by the program that always runs 100 steps
        loop(iter(chunks), tf.constant(30))         # by the program of any number; the rest is kept

    On a GPU, a program whose number of steps is an argument waits for the host before each step. So
    the usual length has a program in which the number is a constant. The other one is compiled when
    another length comes. The first call compiles a program.

    Args:
        step: runs one replica's step on a batch and counts it.
        strategy: a strategy for which XLA compiles complete steps.
        most: the largest number of steps per chunk, which depends on memory.
        input_wait: measures how long the loop waits for chunks.

    Attributes:
        size: steps per chunk.
    """

    step: Callable[[Nest], None]
    _: dataclasses.KW_ONLY
    strategy: tf.distribute.Strategy
    most: int
    input_wait: InputWait

    def __post_init__(self) -> None:
        self.size = self._unit = self.most
        self._usual = 0
        self._chunk: Nest = None
        self._used = self.size  # so that the first call reads a chunk
        self._fixed_program: Any = None
        self.compile_again()

    def fit(self, steps: int) -> bool:
        """Makes chunks fit loops of `steps` steps, if this is the largest number so far.

        Shorter loops come where a loop ends at an evaluation or a checkpoint.

        Returns:
            Whether the size of the chunks has changed.
        """
        if steps <= self._usual:
            return False
        self._usual = steps
        divisors = (n for n in range(min(steps, self.most), 0, -1) if steps % n == 0)
        unit = next(divisors)
        # A long loop that is no multiple of a large number has full chunks and a rest.
        self._unit = unit if unit == steps or 4 * unit > self.most else self.most
        self._fixed_program = None
        size, self.size = self.size, self.most // self._unit * self._unit
        return self.size != size

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> None:
        """Runs steps.

        Args:
            iterator: yields chunks, tensors of shape [size, ...].
            num_steps: scalar, the number of steps.
        """
        remaining = int(num_steps)
        while remaining:
            if self._used >= self.size:
                self._chunk, self._used = self.input_wait.next(iterator), 0
            steps = min(remaining, self.size - self._used, self._unit)
            # Passes the complete chunk and a start: each length of a slice would be compiled.
            arguments = (self._chunk, tf.constant(self._used))
            if steps == self._unit:
                self.on_replicas(self.usual_program())(*arguments)
            else:
                self.on_replicas(self._program)(*arguments, tf.constant(steps))
            self._used += steps
            remaining -= steps

    def compile_again(self) -> None:
        """Drops the compiled programs, so that the next call traces the step and compiles it."""
        self._program = traced(self._run_steps, jit_compile=True)
        self._together: dict[int, Any] = {}
        self._fixed_program = None

    def discard_chunk(self) -> None:
        """Drops the rest of the current chunk, because the data moves to another step."""
        self._chunk, self._used = None, self.size

    def traces(self) -> list[Any]:
        """Returns the concrete functions of the programs that were traced."""
        programs = [each for each in (self._program, self._fixed_program) if each is not None]
        return [trace for each in programs for trace in each._list_all_concrete_functions()]

    def usual_program(self) -> Any:
        """Returns the program of loops of the usual length, a function of a chunk and a start."""
        if self._fixed_program is None:
            self._fixed_program = traced(self._run_steps_of_unit, jit_compile=True)
        return self._fixed_program

    def on_replicas(self, program: Callable[..., object]) -> Callable[..., object]:
        """Returns a function of a program's arguments that runs it on every replica."""
        if self.strategy.num_replicas_in_sync == 1:
            return lambda *arguments: self.strategy.run(program, args=arguments)

        def run(*arguments: Any) -> None:
            self.strategy.run(lambda *own: program(*own, *replicas.arguments()), args=arguments)

        # In eager execution, TensorFlow calls the program of one replica after the other, and the first
        # one would wait for the others in its all-reduce. In a function they run together.
        if id(program) not in self._together:
            self._together[id(program)] = traced(run)
        return self._together[id(program)]

    def _run_steps_of_unit(self, chunk: Nest, start: tf.Tensor, *number: tf.Tensor) -> None:
        self._run_steps(chunk, start, self._unit, *number)

    def _run_steps(
        self, chunk: Nest, start: tf.Tensor, steps: tf.Tensor | int, *number: tf.Tensor
    ) -> None:
        def run_step(i: tf.Tensor) -> tuple[tf.Tensor]:
            # Not `values[start + i]`: XLA takes the bounds of slices for constants, and would compile
            # a program for each start.
            self.step(tf.nest.map_structure(lambda values: _select(values, start + i), chunk))
            return (i + 1,)

        # XLA compiles the loop into the program.
        with replicas.numbered(*number):
            tf.while_loop(lambda i: i < steps, run_step, [tf.constant(0)])


def compile_loop(
    step: Callable[[Batch, Nest], tf.Tensor],
    *, plan: Plan, pipeline: InputPipeline, strategy: tf.distribute.Strategy,
    global_step: tf.Variable, input_wait: InputWait,
) -> CompiledLoop:  # fmt: skip
    """Returns an inner loop as one XLA program.

    Args:
        step: runs one replica's step on a batch and its row mask.
        plan: the resolved options.
        pipeline: the data.
        strategy: a strategy for which XLA compiles complete steps.
        global_step: counts the steps.
        input_wait: measures how long the loop waits for chunks.
    """
    places = devices.replica_devices(strategy)
    resident = []
    if plan.options.placement == "device":
        resident = [pipeline.copy_to_device(device) for device in places]
    spec = tf.TensorSpec([None], tf.int64) if resident else pipeline.element_spec()

    # Chunks contain full batches only, so that a mask is the padding of uneven shares.
    def counted_step(element: Nest) -> None:
        batch, mask = unpack(element)
        if resident:  # a copy for each replica of this process
            own = resident[tf.distribute.get_replica_context()._replica_id]
            batch = own.gather(batch["index"])
        step(batch, mask)
        global_step.assign_add(1)

    most = chunk_size(spec, plan.layout.rows_per_replica * len(places))
    return CompiledLoop(counted_step, strategy=strategy, most=most, input_wait=input_wait)


def _select(values: tf.Tensor | None, index: tf.Tensor) -> tf.Tensor | None:
    return None if values is None else tf.gather(values, index)


def chunk_size(spec: Nest, rows: int) -> int:
    """Returns the most steps per chunk: as many as fit into `CHUNK_BYTES`, at most `MAX_STEPS`.

    Args:
        spec: `tf.TensorSpec`s of a batch, [rows, ...] each.
        rows: rows per batch.
    """
    row_bytes = sum(
        math.prod(n or 1 for n in feature.shape[1:].as_list()) * feature.dtype.size
        for feature in tf.nest.flatten(spec)
    )
    return max(1, min(MAX_STEPS, CHUNK_BYTES // max(1, row_bytes * rows)))
