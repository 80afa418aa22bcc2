"""--mode=find_batch: the largest global batch that fits into memory, by an estimate and by trying.

Each try is a dry run in a process of its own: TensorFlow may abort where the system gives it no memory,
and gives no memory of a device back to the system.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
import dataclasses
import gc
import math
import multiprocessing
import os
import resource
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import config_dict

from ctl.configs import group_values, overrides
from ctl.errors import Failure, UsageError, print_line
from ctl.hardware import host
from ctl.hardware.child_process import TRACEBACK_FOLDER
from ctl.hardware.strategies import StrategyOptions
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, Arguments

if TYPE_CHECKING:  # it imports TensorFlow
    from ctl.trainer import StandardTrainer

_GROWTH, _MAX_GROWTH = 1.25, 16.0  # factors between two batches, while only one limit is known
_PRECISION = 16  # the result is exact to one part in this number
_ADVICE = 'the documentation page "Precision and memory" lists what needs less memory'
_ENDLESS = 2**31  # examples, of data whose length is not known


class _Start(NamedTuple):
    """Where the search starts.

    Attributes:
        guess: the global batch that fits by the estimate; that of the config without one.
        replicas: the number of replicas.
        unit: the batch with one row per replica and micro-batch; the search tries its multiples.
        most: the number of training examples.
        ram: the bytes that a process of a run on CPUs may use; None for a run on GPUs.
        text: describes the memory and the guess.
    """

    guess: int
    replicas: int
    unit: int
    most: int
    ram: int | None
    text: str


def find_batch(arguments: Arguments) -> int:
    """Prints the largest global batch with which the config trains on this machine; keeps nothing.

    Raises:
        UsageError: no batch fits, or the memory is not known.
    """
    if StrategyOptions.from_config(arguments.config.runtime, os.environ).cluster:
        raise UsageError("--mode=find_batch runs in one process: unset TF_CONFIG.")
    # The steps that train the most layers need the most memory.
    groups = group_values.without(arguments.config.optimizer.groups, "frozen_until")
    config = overrides.with_values(arguments.config, {"optimizer.groups": groups})
    # The same disk as that of the run, and no folder of it.
    parent = next(p for p in arguments.workdir.path.absolute().parents if p.exists())
    with tempfile.TemporaryDirectory(prefix=".ctl-find-batch-", dir=parent) as folder:
        arguments = dataclasses.replace(arguments, config=config, workdir=Workdir(f"{folder}/run"))
        start = _run(folder, _estimate, arguments, host.memory_limit())
        if start is None:
            raise UsageError(f"The model does not fit into memory: {_ADVICE}.")
        print_line(start.text)
        batch = find_largest(
            lambda batch: _run(folder, _train, arguments, batch, start.ram),
            start.guess,
            unit=start.unit,
            most=start.most,
        )
    if not batch:
        raise UsageError(f"Not even a batch of {start.unit} fits into memory: {_ADVICE}.")
    if batch == start.most // start.unit * start.unit:
        more = f"; memory would allow about {start.guess:,}" * (start.guess > batch)
        print_line(f"All {start.most:,} examples fit in one batch{more}.")
        return DONE
    setting = f"global_batch_size={batch}"
    if config.data.per_replica_batch_size:
        setting = f"per_replica_batch_size={batch // start.replicas}"
    fits = f"The largest global batch that fits is {batch:,}, to within 1/{_PRECISION}."
    print_line(f"{fits} Set --config.data.{setting}.")
    return DONE


def find_largest(measure: Callable[[int], int | None], guess: int, *, unit: int, most: int) -> int:
    """Finds the largest batch that fits, to within a sixteenth, and prints each try.

    Args:
        measure: returns the peak memory in bytes with a batch; None if it does not fit.
        guess: the first batch to try.
        unit: the batches are multiples of it.
        most: the largest batch to try.

    Returns:
        The largest batch that was tried and fits; 0 if not even `unit` fits.
    """
    low, high, factor = 0, most // unit + 1, _GROWTH  # `low` fits, and `high` does not
    end, tried = high, min(max(guess // unit, 1), high - 1)
    while high - low > max(1, low // _PRECISION):
        peak = measure(tried * unit)
        result = "does not fit" if peak is None else f"fits ({peak / 2**30:.2f} GiB)"
        print_line(f"a batch of {tried * unit:,} {result}")
        low, high = (low, tried) if peak is None else (tried, high)
        if not low:
            tried = max(1, int(high / factor))
        elif high == end:
            tried = min(high - 1, max(low + 1, int(low * factor)))
        else:
            tried = max(low + 1, math.isqrt(low * high))
        factor = min(factor**2, _MAX_GROWTH)
    return low * unit


def with_batch(config: config_dict.ConfigDict, batch: int) -> config_dict.ConfigDict:
    """Returns a locked copy of a config with another global batch."""
    values = {"data.global_batch_size": batch, "data.per_replica_batch_size": 0}
    return overrides.with_values(config, values)


def check_examples(trainer: "StandardTrainer") -> None:
    """Raises UsageError if `build_dataset` returns batches, whose size ctl cannot change."""
    from ctl.built.inner_loop import pipeline_of

    if pipeline_of(trainer).data("train").in_batches:
        raise UsageError(
            "find_batch cannot change the size of the batches that build_dataset returns: let it return "
            "examples."
        )


def _estimate(arguments: Arguments, ram: int | None) -> _Start:
    """Estimates the largest batch that fits, from the step traced with two batches."""
    from ctl.built import memory_estimate, out_of_memory
    from ctl.built.inner_loop import plan_of
    from ctl.hardware import device_memory, devices
    from ctl.modes import experiment

    hardware = experiment.build_hardware(arguments.config.runtime)
    device = devices.replica_devices(hardware.strategy)[0]
    replicas = hardware.strategy.num_replicas_in_sync
    ram = ram if device.startswith("CPU") else None
    limit = ram or device_memory.gpu_memory_limit(device)
    if limit is None:
        raise UsageError(
            f"The memory of {device} is not known, so find_batch cannot search; for a TPU, try "
            "several batches with --mode=aot_compile."
        )
    _limit(ram)
    usable = out_of_memory.USABLE * limit - (host.peak_memory() if ram else 0)
    size = experiment.resolve_batch_size(arguments.config, replicas).data.global_batch_size

    def build(batch: int) -> experiment.Experiment:
        gc.collect()  # the trainer before it
        config = with_batch(arguments.config, batch)
        return experiment.build(config, arguments.config_path, evaluates=False, hardware=hardware)

    def needs(built: experiment.Experiment) -> int:
        memory = memory_estimate.estimate(built.trainer)
        # The replicas of CPUs and the input pipeline share the memory.
        return replicas * (memory.peak + memory.prefetched) if ram else memory.peak

    built = build(size)
    check_examples(built.trainer)
    unit = replicas * plan_of(built.trainer).micro_batches
    most = built.examples_per_epoch or _ENDLESS
    if most < unit:
        raise UsageError(
            f"The training data has {most} examples, fewer than the replicas times the micro-batches, "
            f"{unit}: use fewer of them."
        )
    try:
        first = needs(built)
        del built
        per_row = max(1, needs(build(2 * size)) - first) / size
    except UsageError as error:
        text = f"The first try is the config's batch, because the memory is not estimated: {error}"
        return _Start(size, replicas, unit, most, ram, text)
    guess = max(unit, size + int((usable - first) / per_row))
    may_use = f"{device} may use {limit / 2**30:.2f} GiB"
    text = f"{may_use}: by the traced step, a batch of {guess:,} fits."
    return _Start(guess, replicas, unit, most, ram, text)


def _train(arguments: Arguments, batch: int, ram: int | None) -> int:
    """Trains, evaluates and saves for two steps; returns the peak memory in bytes."""
    import tensorflow as tf

    from ctl.modes import train

    _limit(ram)
    config = with_batch(arguments.config, batch)
    train.train_and_eval(dataclasses.replace(arguments, config=config, dry_run=True))
    if ram:
        return host.peak_memory()
    gpus = range(len(tf.config.list_logical_devices("GPU")))
    return max(tf.config.experimental.get_memory_info(f"GPU:{gpu}")["peak"] for gpu in gpus)


def _limit(ram: int | None) -> None:
    """Lets the kernel refuse more memory to this process, so that no try affects another program."""
    if ram:
        resource.setrlimit(resource.RLIMIT_DATA, (ram, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _run(folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `function(*arguments)`, computed in another process; None if it is out of memory.

    Args:
        folder: for temporary files, which a killed process leaves behind.
        function: the function.
        *arguments: its arguments.
    """
    # Forks of a process that has imported TensorFlow, which takes seconds, and nothing of the user.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ctl.modes.train"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_call, folder, function, *arguments).result()
        except BrokenProcessPool:  # killed by the kernel, or by a library that reports no errors
            return None


def _call(folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `function(*arguments)`, without output; None if it is out of memory."""
    os.environ[TRACEBACK_FOLDER] = tempfile.gettempdir()  # which is kept
    tempfile.tempdir = folder
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # also for C++
    os.dup2(null, 2)

    from ctl.built import out_of_memory
    from ctl.modes import user_errors

    try:
        with user_errors.report_user_errors(None):
            return function(*arguments)
    except Exception as error:
        if out_of_memory.is_out_of_memory(error):
            return None
        # Not the exception itself, which may hold what cannot be sent.
        if isinstance(error, UsageError):
            raise UsageError(f"{error}") from None
        kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
        raise Failure(f"{kind}{error}") from None
