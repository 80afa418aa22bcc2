"""--mode=profile_input: measures if the input pipeline or the step limits the training speed."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import gc
import itertools
import math
import time
from typing import Any

import orbit
import tensorflow as tf

from ctl.built.inner_loop import loop_of, pipeline_of, plan_of
from ctl.compile import serial_loops
from ctl.configs import error_location, keys, overrides
from ctl.data import batching
from ctl.data.distribution import disable_autotune
from ctl.data.kinds import Kind
from ctl.data.source import Arrays, Source
from ctl.errors import UsageError, print_line
from ctl.hardware import gpu, selection, strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.modes import DONE, Arguments, experiment, step_time
from ctl.trainer import StandardTrainer
from ctl.update.config import COMPLETE_STEPS, XLA_MODES

SECONDS = 2.0  # of each measurement
_WAIT = 0.05  # a larger share of waiting makes the input pipeline the bottleneck
_GROWTH = 8  # maximum growth of the number of steps, until a loop takes long enough
_FASTER = 1.1  # a smaller difference may be due to other programs


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds per global batch.

    Attributes:
        both: seconds of training.
        waited: the share of `both` in which the steps waited for batches; None if it is not measured.
        pipeline: seconds of the input pipeline alone.
        step: seconds of the step alone, on one batch that is in memory.
        examples: seconds of reading and parsing alone, without augmentation; None if not known.
    """

    both: float
    waited: float | None
    pipeline: float
    step: float
    examples: float | None

    @property
    def is_input_bound(self) -> bool:
        """Whether the input pipeline is the bottleneck."""
        if self.waited is None:
            return self.pipeline > self.step
        # A pipeline that is much faster than the step makes it wait only for the hand-over.
        return self.waited > _WAIT and self.pipeline > self.step / 2


def profile_input(arguments: Arguments) -> int:
    """Trains for a few seconds, prints what limits the speed, and writes nothing."""
    # Before this process takes the memory of the GPUs.
    apart = dict(measure_apart(arguments)) if has_several_gpus(arguments.config) else {}
    built = experiment.build(arguments.config, arguments.config_path, evaluates=False)
    if strategies.spec_of(built.hardware.strategy).coordinated:
        raise UsageError(
            "--mode=profile_input does not support parameter servers, whose workers read their own "
            "batches: profile with another runtime.strategy on the machine of a worker."
        )
    hardware, processes = built.hardware, ProcessGroup(built.hardware)
    report = print_line if hardware.is_chief else lambda line: None
    profile = all_measure(built.trainer, processes)
    for line in describe(profile, built.trainer):
        report(line)
    if not profile.is_input_bound:
        for line in describe_serial_loops(built.trainer):
            report(line)
    used = plan_of(built.trainer).xla
    del built  # the memory of a device may hold one trainer only
    if not profile.is_input_bound:
        for line in all_compare_xla(arguments, hardware, used, profile.step, processes, apart):
            report(line)
    return DONE


def has_several_gpus(config: Any) -> bool:
    """Whether a config trains on several GPUs of this machine."""
    gpus = gpu.list_gpus()
    if not gpus or len(config.runtime.devices or gpus) < 2:
        return False
    spec = strategies.STRATEGIES.get(config.runtime.strategy)  # none for auto, which takes all
    return spec is None or spec.scope == "all"


def measure_apart(arguments: Arguments) -> Iterator[tuple[str, float | UsageError]]:
    """Times complete steps of several GPUs, in processes of their own.

    Yields:
        The mode, and the seconds of its step alone, or why it does not work here.
    """
    for mode in COMPLETE_STEPS:
        config = overrides.with_values(arguments.config, {"runtime.xla": mode})
        try:
            yield mode, step_time.measure(config, arguments.config_path)
        except UsageError as error:
            yield mode, error


def all_measure(trainer: StandardTrainer, processes: ProcessGroup) -> Profile:
    """Measures training, the input pipeline alone, and the step alone; collective.

    Args:
        trainer: it is trained for a few seconds.
        processes: the processes of the run, which train the same number of steps.
    """
    inner_loop = loop_of(trainer)
    wait, unit = inner_loop.step.results.input_wait, 1
    if inner_loop.compiled_loop:
        unit = inner_loop.compiled_loop.size  # steps per chunk: less would only read a part of one
    inner_loop.step.results.measure_waiting()

    def train(steps: int) -> None:
        wait.reset()
        for value in tf.nest.flatten(trainer.train(tf.constant(steps)) or {}):
            orbit.utils.get_value(value)  # waits for the devices

    both, seconds = _all_time(train, unit, processes)
    waited = wait.read()
    share = None if waited is None else min(1.0, processes.maximum(waited) / seconds)
    iterator = iter(inner_loop.training_data(int(trainer.global_step.numpy())))
    pipeline, _ = _all_time(_make_reader(iterator, unit), unit, processes)
    step, _ = _all_time(_make_step(trainer, next(iterator)), unit, processes)
    source, examples = inner_loop.pipeline.data("train").source, None
    if source is not None and not source.has_own_order:
        read = _make_example_reader(source, trainer.global_batch_size)
        examples, _ = _all_time(read, 1, processes)
    return Profile(both, share, pipeline, step, examples)


def describe_serial_loops(trainer: StandardTrainer) -> Iterator[str]:
    """Yields a line for each loop that XLA makes of an operation of the step, under xla=loop."""
    inner_loop = loop_of(trainer)
    loop = inner_loop.compiled_loop
    if loop is None or trainer.strategy.num_replicas_in_sync > 1:  # a program needs its replica
        return
    chunk = next(iter(inner_loop.training_data(int(trainer.global_step.numpy()))))
    for each in serial_loops.find(loop.usual_program(), (chunk, tf.constant(0))):
        yield (
            f"{each.line or each.name}: XLA makes a loop of {each.iterations:,} iterations per step "
            f"of {each.name.rpartition('/')[2]}. Sort instead of tf.unique; cut a recurrence short."
        )


def all_compare_xla(
    arguments: Arguments, hardware: selection.Hardware, used: str, seconds: float,
    processes: ProcessGroup, apart: Mapping[str, float | UsageError],
) -> Iterator[str]:  # fmt: skip
    """Times the step alone with the other modes of `runtime.xla`; collective.

    Auto-clustering is left out, because it is a setting of the complete process.

    Args:
        arguments: those of the mode.
        hardware: the strategy.
        used: the mode that was measured before.
        seconds: the seconds of its step alone.
        processes: the processes of the run.
        apart: the modes that were timed before, as of `measure_apart`.

    Yields:
        A line for each mode, and what to change.
    """
    tf.config.optimizer.set_jit(False)  # the mode `used` may be auto-clustering
    fastest, least = used, seconds
    for mode in XLA_MODES:
        if mode in ("auto", "autocluster", used):
            continue
        name = f"runtime.xla={mode}"
        config = overrides.with_values(arguments.config, {"runtime.xla": mode})
        try:
            keys.check_rules(keys.flatten(config))
            known = apart.get(mode)
            if isinstance(known, UsageError):
                raise known
            took = known or _all_time_step(config, arguments.config_path, hardware, processes)
        # XLA's errors are among these. Each process gets them, unlike that of a lost connection.
        except (UsageError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            yield f"{name} is not possible: {error_location.describe(error)}"
            continue
        yield f"{name:<21} {1e3 * took:10.2f} ms per step alone, {seconds / took:.2f} times as fast"
        if took < least:
            fastest, least = mode, took
    if seconds / least < _FASTER:
        yield "-> runtime.precision or more devices; train.profile shows the operations of the step."
    else:
        yield f"-> --config.runtime.xla={fastest}"


def _all_time_step(
    config: Any, config_path: str, hardware: selection.Hardware, processes: ProcessGroup
) -> float:
    """Builds a trainer, and returns the seconds of its step alone; collective."""
    gc.collect()  # the trainer before this one
    built = experiment.build(config, config_path, evaluates=False, hardware=hardware)
    return time_step(built.trainer, config.train.steps_per_loop, processes)


def time_step(
    trainer: StandardTrainer, steps_per_loop: int, processes: ProcessGroup | None = None
) -> float:
    """Returns the seconds of the step alone; collective."""
    loop_of(trainer).prepare(steps_per_loop)
    step = _make_step(trainer, next(iter(trainer.train_dataset)))
    return _all_time(step, 1, processes or ProcessGroup())[0]


def describe(profile: Profile, trainer: StandardTrainer) -> Iterator[str]:
    """Yields the lines of a report: the times, the bottleneck, and what to change in the data."""
    size = trainer.global_batch_size
    waited = "" if profile.waited is None else f", {profile.waited:.0%} of it waiting for input"
    rows = (("training", profile.both, waited), ("input alone", profile.pipeline, ""))
    for name, seconds, note in (*rows, ("step alone", profile.step, "")):
        rate = f"{size / seconds:,.0f} examples/s"
        yield f"{name:<12} {1e3 * seconds:10.2f} ms per batch {rate:>22}{note}"
    data = pipeline_of(trainer).data("train")
    if not profile.is_input_bound:
        yield "The step is the bottleneck: no key of data.* makes training faster."
        return
    yield "The input pipeline is the bottleneck."
    if 1.2 * max(profile.pipeline, profile.step) < profile.both:
        yield "It shares the processor cores with the step: both are faster alone."
    yield f"-> {_advise(profile, trainer, data)}."


def _advise(profile: Profile, trainer: StandardTrainer, data: Kind) -> str:
    """Advises how to make the input pipeline faster."""
    source = data.source
    if source is None:
        return (
            "give every map of the tf.data.Dataset num_parallel_calls=tf.data.AUTOTUNE, or return a "
            "ctl.data.Source"
        )
    in_examples = profile.examples is not None and profile.examples > profile.pipeline / 2
    if in_examples and not isinstance(source, Arrays) and not trainer.options.cache:
        return (
            "most of the time reads and parses examples: set data.cache=memory, or data.cache to a "
            "folder on a local disk"
        )
    if data.augment is not None and not in_examples:
        return (
            "most of the time augments examples: use fewer operations, or augment in `preprocess` on "
            "the device, by ctl.random"
        )
    fits = type(source) is Arrays and data.augment is None  # as data.placement=device requires
    if fits and trainer.options.placement == "stream":
        return "with one replica, set data.placement=device and runtime.xla=loop"
    return "use more processor cores, or a larger data.prefetch if the times of batches differ"


def _all_time(
    run: Callable[[int], None], unit: int, processes: ProcessGroup
) -> tuple[float, float]:
    """Times `run(steps)`, which runs a multiple of `unit` steps; collective.

    Returns:
        The seconds per step, and the seconds of the last call.
    """
    run(unit)  # traces, and fills the buffers of the pipeline
    steps = unit
    while True:
        begin = time.perf_counter()
        run(steps)
        # The same in all processes, so that all run the same number of steps.
        seconds = processes.maximum(time.perf_counter() - begin)
        if seconds > SECONDS / 2:
            return seconds / steps, seconds
        goal = min(_GROWTH * steps, SECONDS * steps / max(seconds, 1e-6))
        steps = unit * max(steps // unit + 1, math.ceil(goal / unit))


def _make_reader(iterator: Any, unit: int) -> Callable[[int], None]:
    """Returns a function that reads the batches of a number of steps."""
    if unit > 1:

        def read_chunks(steps: int) -> None:
            for _ in range(steps // unit):
                next(iterator)

        return read_chunks

    read = tf.function(orbit.utils.create_tf_while_loop_fn(next))
    return lambda steps: read(iterator, tf.constant(steps))


def _make_step(trainer: StandardTrainer, element: Any) -> Callable[[int], None]:
    """Returns a function that runs steps on one element of the training data."""
    inner_loop = loop_of(trainer)
    if inner_loop.compiled_loop:
        compiled = inner_loop.compiled_loop
        loop = lambda steps: compiled(itertools.repeat(element), steps)  # noqa: E731
        compiled.discard_chunk()
    else:
        # The batch is captured by the graph, so no iterator is read.
        batches = itertools.repeat(element)
        steps_fn = orbit.utils.create_tf_while_loop_fn(lambda _: trainer.train_step(batches))
        loop = tf.function(lambda steps: steps_fn(None, steps))

    def run(steps: int) -> None:
        with inner_loop.report_errors(), inner_loop.step.trace_scope():
            trainer.train_loop_begin()
            loop(tf.constant(steps))
            for value in tf.nest.flatten(trainer.train_loop_end() or {}):
                orbit.utils.get_value(value)

    return run


def _make_example_reader(source: Source, batch_size: int) -> Callable[[int], None]:
    """Returns a function that reads and parses the examples of a number of global batches."""
    count = max(1, len(source) // batch_size) * batch_size
    examples = batching.all_examples(source).map(lambda _: 0).take(count).repeat()
    iterator = iter(disable_autotune(examples.batch(batch_size)))

    def read(steps: int) -> None:
        for _ in range(steps):
            next(iterator)

    return read
