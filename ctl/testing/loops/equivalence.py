"""Tests that the update of any training loop is a function of the global batch alone."""

from collections.abc import Iterable, Sequence
import dataclasses
import os
import time
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.testing import processes, splits, trial
from ctl.testing.devices import split_cpu
from ctl.testing.loops.protocol import LoopSplit
from ctl.testing.loops.runner import Build, LoopSpec
from ctl.testing.loops.trial import LoopTrial
from ctl.testing.report import NotComparable, Report
from ctl.testing.splits import Split

_TIMEOUT = 600.0  # seconds for a comparison in another process
_FULL = "the loop takes full batches only (full_batches=True)"


def assert_loop_equivalent(
    build: Build,
    batches: Any,
    *,
    replicas: Sequence[int] = (1, 2, 4),
    batch_sizes: Sequence[int] | None = None,
    steps: int = 3,
    mask: str = "",
    full_batches: bool = False,
    in_process: bool | None = None,
) -> Report:
    """Asserts that the update of any training loop is a function of the global batch alone.

        def test_my_loop():
            ctl.testing.assert_loop_equivalent(build, {"x": x, "label": label})

    Builds the loop on one replica and on several logical CPUs, gives it the same weights, and trains
    it on the same global batches, with even, uneven and empty per-replica batches, in float64. Compares
    the loss, each variable's update, moving statistics, metrics, all other variables such as slots, and
    the replicas' copies of all of them.

    Args:
        build: `build(strategy, global_batch_size)` returns a `ctl.testing.Loop(step, variables)`, an
            object with `step` and `variables`, an `orbit.StandardTrainer`, or a compiled model of
            tf_keras or Keras 3. It must create its variables in the scope of the strategy.
        batches: examples: an array, or a tuple or dict of arrays, whose rows are the examples; or a
            list of such batches. The examples should differ from each other.
        replicas: numbers of replicas to compare.
        batch_sizes: global batch sizes; by default 8 and 5, which are even, uneven, and leave a
            replica of 4 without rows.
        steps: number of training steps.
        mask: name of a feature to add to a dict of examples. Every replica then gets the same number
            of rows; the feature, [rows], is 1 for rows and 0 for padding, which repeats the last row.
            Without it, replicas get different numbers of rows.
        full_batches: True for a loop that takes full batches only: only even splits are compared.
        in_process: True to compare in this process; False for a new process, which takes a few
            seconds more; None for this process if TensorFlow is configured as required.

    Returns:
        The report of what was compared.

    Raises:
        AssertionError: something differs; the message states the quantity, the split, the factor and
            the likely cause.
        NotComparable: the comparison cannot tell, because the loop draws random numbers, for example.
        UsageError: the arguments are wrong.
    """
    report = check_loop_equivalence(
        build,
        batches,
        replicas=replicas,
        batch_sizes=batch_sizes,
        steps=steps,
        mask=mask,
        full_batches=full_batches,
        in_process=in_process,
    )
    if report.verdict == "cannot tell":
        raise NotComparable(report.failure())
    if not report.equivalent:
        raise AssertionError(report.failure())
    return report


def check_loop_equivalence(
    build: Build,
    batches: Any,
    *,
    replicas: Sequence[int] = (1, 2, 4),
    batch_sizes: Sequence[int] | None = None,
    steps: int = 3,
    mask: str = "",
    full_batches: bool = False,
    in_process: bool | None = None,
) -> Report:
    """Does the same as `assert_loop_equivalent`, but returns the differences in the report."""
    sizes = batch_sizes or splits.default_batch_sizes(max(replicas), 2)
    chosen = [
        LoopSplit(split.batch, split.replicas)
        for split in splits.choose_splits(replicas, (1,), sizes)
    ]
    if full_batches and not any(split.even for split in chosen):
        raise UsageError(
            f"full_batches=True excludes all splits of batch_sizes={tuple(sizes)} on "
            f"{' or '.join(str(count) for count in replicas if count > 1)} replicas: include a batch "
            "size that one of these numbers divides."
        )
    examples = _concatenate(batches, max(split.batch for split in chosen))
    if mask and not isinstance(examples, dict):
        raise UsageError(
            f"mask={mask!r} adds a feature to a dict of examples: give batches as a dict."
        )
    spec = LoopSpec(build, examples, mask, steps)
    if in_process is None:
        in_process = trial.can_run_here(max(replicas))
    if in_process:
        return run(spec, chosen, full_batches)
    variables = {k: v for k in ("TF_USE_LEGACY_KERAS",) if (v := os.environ.get(k)) is not None}
    arguments = [spec, chosen, full_batches]
    report: Report = processes.call(
        *(_split_cpu_and_run, arguments, [variables]),
        timeout=_TIMEOUT,
        alternative=processes.IN_THIS_PROCESS.format(devices=max(replicas)),
    )[0]
    return report


def _split_cpu_and_run(spec: LoopSpec, chosen: Sequence[LoopSplit], full_batches: bool) -> Report:
    split_cpu(max(split.replicas for split in chosen))
    return run(spec, chosen, full_batches)


def run(spec: LoopSpec, chosen: Sequence[LoopSplit], full_batches: bool = False) -> Report:
    """Compares splits in this process, which needs a logical CPU for each replica.

    Args:
        spec: what to run.
        chosen: the splits to compare.
        full_batches: whether to skip uneven splits.
    """
    start = time.monotonic()
    refused: dict[Split, str] = {s: _FULL for s in chosen if full_batches and not s.even}
    report = LoopTrial(spec).run([split for split in chosen if split not in refused])
    name = getattr(spec.build, "__name__", None) or str(spec.build)
    seconds = time.monotonic() - start
    return dataclasses.replace(report, trainer=name, refused=refused, seconds=seconds)


def _concatenate(batches: Any, required: int) -> Any:
    """Concatenates the batches of a list; raises UsageError if there are too few examples."""
    parts: Iterable[Any] = batches if isinstance(batches, list) else [batches]
    parts = list(parts)
    if not parts or not tf.nest.flatten(parts):
        raise UsageError("batches is empty: give arrays of examples, or a list of batches.")
    examples = tf.nest.map_structure(lambda *values: np.concatenate(values), *parts)
    counts = {len(values) for values in tf.nest.flatten(examples)}
    if len(counts) > 1:
        raise UsageError(
            f"The arrays in batches must have the same number of rows, but have {counts}."
        )
    if min(counts) < required:
        raise NotComparable(
            f"The batches have {min(counts)} examples in total, but the comparison requires {required} "
            "that differ from each other: give more, or smaller batch_sizes."
        )
    return examples
