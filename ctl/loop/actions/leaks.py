"""Reports what leaks memory: functions that are traced again, and memory that keeps growing."""

from collections.abc import Iterator, Mapping
import os
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ctl.loop.actions.action import LoopAction
from ctl.trainer import StandardTrainer

if TYPE_CHECKING:
    from ctl.evaluator import StandardEvaluator

_TRACING_LOOPS = 2  # these trace what the following loops run
_ARGUMENT = re.compile(r"^ +(\w+) \(\w+\): (.+)$", re.MULTILINE)
_TENSOR = re.compile(r"(?:('\w+'): )?TensorSpec\(shape=(\([^)]*\)|None), dtype=tf\.(\w+)")
_RETRACE_FACTOR = 10  # a function is reported again when it was traced this many times as often
_STATM = pathlib.Path("/proc/self/statm")  # Linux
_FILLING_LOOPS = 10  # buffers, caches and allocators fill during these
_PARTS = 4  # of the loops; each must contribute to the growth
_MIB = 2**20
_LEAST_GROWTH = 256 * _MIB


class MemoryGrowth(LoopAction):
    """Prints and records one line if the resident memory keeps growing.

    Graphs of `tf.function`s are never freed (tensorflow#124972, #62854), and lists in a trainer or an
    action grow as well. A single increase is no leak: growth is reported if it is at least a quarter of
    the memory and 256 MiB, and if each quarter of the loops since the tenth has contributed to it. It
    is reported again when it has doubled. Reading the memory costs microseconds per loop.
    """

    def __init__(self) -> None:
        self._loops = 0
        self._first_step = 0
        self._samples: list[int] = []
        self._reported = 0

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Adds a measurement."""
        self._loops += 1
        if self._loops < _FILLING_LOOPS:
            return
        if self._loops == _FILLING_LOOPS:
            self._first_step = self.controller.step
        self._samples.append(read_resident_bytes())
        # Every second sample is dropped when there are many, so that a long run does not collect them.
        if len(self._samples) > 64 * _PARTS:
            self._samples = self._samples[::2]
        before, now = self._samples[0], self._samples[-1]
        growth = now - before
        limit = max(_LEAST_GROWTH, before / 4, 2 * self._reported)
        if growth >= limit and _grows_throughout(self._samples, by=growth / (2 * _PARTS)):
            self._reported = growth
            self._report(before, now)

    def _report(self, before: int, now: int) -> None:
        reporter, step = self.controller.reporter, self.controller.step
        reporter.record("memory_growth", step, before=before, after=now)
        rate = (now - before) / _MIB / max(step - self._first_step, 1) * 1000
        reporter.print_line(
            f"The memory of this process grows: {before / _MIB:,.0f} MiB at step {self._first_step}, "
            f"{now / _MIB:,.0f} MiB now, {rate:,.0f} MiB per 1,000 steps. Check for functions that "
            "are traced again, and for lists of tensors in the trainer or its actions."
        )


def _grows_throughout(samples: list[int], *, by: float) -> bool:
    """Returns whether the minimum of each part of the samples exceeds the previous one by `by`."""
    if len(samples) < 2 * _PARTS:
        return False
    least = [part.min() for part in np.array_split(samples, _PARTS)]
    return bool((np.diff(least) >= by).all())


def read_resident_bytes() -> int:
    """Returns the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Retraces(LoopAction):
    """Prints and records one line for a `tf.function` that is traced again after the second loop.

    Each trace takes seconds, and its graph is never freed (tensorflow#62854). The action checks the
    inner loop, and functions that are attributes of the trainer, its model or its evaluator, or are
    defined in the trainer's module. Reading their counters costs microseconds per loop.
    """

    def __init__(self) -> None:
        self._loops = 0
        self._counts: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._signatures: dict[str, list[str]] = {}

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        """Compares the number of traces with the number after the previous loop."""
        self._loops += 1
        if self._loops < _TRACING_LOOPS:
            return
        for name, function in _list_functions(self.controller.trainer, self.controller.evaluator):
            count = function.experimental_get_tracing_count()
            before = self._counts.get(name, 0)
            if count == before:
                continue
            self._counts[name] = count
            signatures = str(function.pretty_printed_concrete_signatures()).split("\n\n")
            old, self._signatures[name] = self._signatures.get(name, []), signatures
            # The first loop or evaluation that calls a function may trace it more than once.
            if before and count >= self._limits.get(name, 0):
                self._limits[name] = _RETRACE_FACTOR * count
                new = [signature for signature in signatures if signature not in old]
                self._report(name, count, _describe_change(old, new))

    def _report(self, name: str, count: int, change: str) -> None:
        reporter, step = self.controller.reporter, self.controller.step
        reporter.record("retrace", step, function=name, traces=count, change=change)
        reporter.print_line(
            f"{name} was traced again before step {step}, {count} times so far{change}: each trace "
            "takes time and memory; pass tensors of constant shape and dtype, and no Python numbers."
        )


def _list_functions(
    trainer: StandardTrainer, evaluator: "StandardEvaluator | None"
) -> Iterator[tuple[str, Any]]:
    """Yields the `tf.function`s of a run, with the names that the user knows."""
    loop = getattr(trainer, "_train_loop_fn", None)
    compiled = getattr(loop, "_program", None) or getattr(loop, "_run_steps", None)
    for function in (loop, compiled):
        if _is_function(function):
            yield "the training loop", function
    model = getattr(trainer, "model", None)
    for owner, value in (("trainer", trainer), ("model", model), ("evaluator", evaluator)):
        for name in _list_names(value):
            function = getattr(value, name, None)
            if _is_function(function) and function is not loop:
                yield f"{owner}.{name}", function
    module = sys.modules.get(type(trainer).__module__)
    for name, function in vars(module).items() if module else ():
        if _is_function(function):
            yield name, function


def _list_names(value: Any) -> list[str]:
    """Returns the names of the attributes that are `tf.function`s, without calling properties."""
    own = [name for name, item in vars(value).items() if _is_function(item)] if value else []
    bases = [c for c in type(value).__mro__ if c.__module__.split(".")[0] != "tf_keras"]
    return own + [name for c in bases for name, item in vars(c).items() if _is_function(item)]


def _is_function(value: Any) -> bool:
    return isinstance(value, tf.types.experimental.PolymorphicFunction)


def _describe_change(old: list[str], new: list[str]) -> str:
    """Describes which arguments differ from an earlier trace; "" if that is not known."""
    if not (old and new):
        return ""
    before, after = _read_arguments(old[-1]), _read_arguments(new[-1])
    changed = [
        f"{name} was {before[name]}, and is {value}"
        for name, value in after.items()
        if name in before and before[name] != value
    ]
    return f" ({'; '.join(changed)})" if changed else ""


def _read_arguments(signature: str) -> dict[str, str]:
    """Returns the arguments in a printed signature: name -> value, or dtype and shape.

    A structure of tensors, such as an iterator's, has one entry per tensor: "iterator['label']".
    """
    arguments: dict[str, str] = {}
    for name, text in _ARGUMENT.findall(signature.partition("Output Type:")[0]):
        specs = _TENSOR.findall(text)
        if not specs:
            arguments[name] = text.removeprefix("Literal[").removesuffix("]")
        for index, (key, shape, dtype) in enumerate(specs):
            place = f"[{key or index}]" if len(specs) > 1 else ""
            arguments[f"{name}{place}"] = f"{dtype} {shape}"
    return arguments
