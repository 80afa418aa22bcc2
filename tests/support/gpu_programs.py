"""The programs of complete steps that XLA would compile for several GPUs, traced without one.

TensorFlow's strategies do not merge replicas in a program of XLA if all devices are GPUs. Here they
believe that logical CPUs are GPUs, and use the collectives of NCCL. TensorFlow can trace and export such
programs, and refuses to run their collectives on CPUs.
"""

from collections.abc import Iterator
import contextlib
import itertools
import re
import types
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    collective_util,
    cross_device_ops,
    mirrored_run,
    mirrored_strategy,
)
from tensorflow.python.eager.polymorphic_function import compiler_ir

from ctl.built.inner_loop import loop_of
from ctl.compile import xla
from ctl.data.autograph import traced
from ctl.modes.aot_compile import execution
from ctl.modes.aot_compile.execution import Execution

_MODULES = (mirrored_run, mirrored_strategy, collective_all_reduce_strategy)


@contextlib.contextmanager
def pretended(replicas: int, *, workers: bool = False) -> Iterator[Any]:
    """Makes a strategy of logical CPUs that are taken for GPUs within a `with` block.

    Args:
        replicas: the number of replicas.
        workers: make a MultiWorkerMirroredStrategy of one worker.
    """
    devices = [f"/cpu:{i}" for i in range(replicas)]
    nccl = collective_util.Options(implementation=collective_util.CommunicationImplementation.NCCL)
    if workers:
        kind = tf.distribute.MultiWorkerMirroredStrategy
        strategy = kind._from_local_devices(devices, communication_options=nccl)
        strategy.extended._retrace_functions_for_each_device = replicas > 1
    else:
        strategy = tf.distribute.MirroredStrategy(devices)
    extended = strategy.extended
    extended._collective_ops = cross_device_ops.CollectiveAllReduce(
        devices=extended._devices,
        group_size=replicas,
        options=nccl,
        collective_keys=extended._collective_keys,
    )
    with contextlib.ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(mock.patch.object(module, "_is_gpu_device", lambda device: True))
        stack.enter_context(
            mock.patch.object(xla, "compiles_collectives", lambda each: each is strategy)
        )
        yield strategy


def export(trainer: Any, steps: int) -> Execution:
    """Traces the first steps of a trainer, and returns the program of its replicas.

    Raises:
        AssertionError: the replicas have different programs.
    """
    inner_loop = loop_of(trainer)
    inner_loop.prepare(steps)
    loop = inner_loop.compiled_loop
    with _recorded() as programs, inner_loop.step.trace_scope():
        elements = iter(inner_loop.training_data(0))
        if loop is None:
            traced(trainer.train_step).get_concrete_function(elements)
        else:
            programs.append(loop.usual_program())
            run = loop.on_replicas(programs[0])
            run.get_concrete_function(next(elements), tf.constant(0))
    elements = itertools.islice(inner_loop.training_data(0), 1 if loop else steps)
    return _collect(trainer, programs, [*elements], start=bool(loop))


def export_step(step: Any, batches: Iterator[Any], steps: int) -> Execution:
    """Does the same for the first steps of a `ctl.Step`."""
    elements = [next(batches) for _ in range(steps)]
    step.build(elements[0])
    with _recorded() as programs:
        traced(step._run).get_concrete_function(elements[0])
    return _collect(as_trainer(step), programs, elements)


def as_trainer(step: Any) -> Any:
    """Returns an object with what `execution` reads of a trainer."""
    loop = types.SimpleNamespace(step=step.built())
    return types.SimpleNamespace(
        _ctl_loop=loop, metrics=step.metrics, global_step=step.global_step, strategy=step.strategy
    )


@contextlib.contextmanager
def _recorded() -> Iterator[list[Any]]:
    """Collects the programs that `xla.jit` makes within a `with` block."""
    programs: list[Any] = []

    def record(function: Any, **options: Any) -> Any:
        programs.append(traced(function, **options))
        return programs[-1]

    with mock.patch.object(xla, "traced", record):
        yield programs


def _collect(trainer: Any, programs: Any, elements: Any, *, start: bool = False) -> Execution:
    """Returns the programs of the replicas with their arguments.

    Args:
        trainer: the trainer.
        programs: the functions that were traced.
        elements: the data of each run of the program.
        start: whether the program is a loop that gets its first step, and counts the steps.
    """
    replicas, variables = trainer.strategy.num_replicas_in_sync, execution.state(trainer)
    all_traces = [trace for p in programs for trace in p._list_all_concrete_functions()]
    by_replica = {_replica_of(trace, variables): trace for trace in all_traces}
    traces = [by_replica[r] for r in range(replicas)]
    texts = [_without_names(_export(trace, r, "hlo")) for r, trace in enumerate(traces)]
    assert all(text == texts[0] for text in texts)
    arguments: dict[str, Any] = {}
    for r, trace in enumerate(traces):
        read, places = execution.captured(trace, variables)
        arguments |= {f"{i}_{r}": value for i, value in read.items()}
        inputs = [i for i in range(len(places)) if i not in read]
        # The keys of the collectives, which a program of XLA does not read.
        arguments |= {f"{i}_{r}": np.int32(0) for i in inputs}
        for n, element in enumerate(elements):
            own = [_component(v, r) for v in tf.nest.flatten(element)]
            own = [v for v in own if v is not None]
            # The number of the replica is the last argument of a loop, and the first of a step.
            given = [*own, 0, r] if start else [r, *own]
            for i, value in zip(inputs, given, strict=False):
                x = trace.graph.inputs[i]
                arguments[f"{i}_{r}_{n}"] = np.asarray(value, x.dtype.as_numpy_dtype)
                assert arguments[f"{i}_{r}_{n}"].shape == x.shape
            for i, place in enumerate(places):
                if place is not None and variables[place] is trainer.global_step and not start:
                    arguments[f"{i}_{r}_{n}"] = np.int64(n)  # counted after the program
    hlo = _export(traces[0], 0, "hlo_serialized")
    return Execution(hlo, replicas, len(elements), arguments, places)


def _component(value: Any, replica: int) -> Any:
    return value.values[replica] if isinstance(value, tf.distribute.DistributedValues) else value


def _replica_of(trace: Any, variables: Any) -> int:
    places = {
        id(part.handle): r
        for v in variables
        if isinstance(v, tf.distribute.DistributedValues)
        for r, part in enumerate(v.values)
    }
    return next(places[id(outer)] for outer, _ in trace.graph.captures if id(outer) in places)


def _export(trace: Any, replica: int, stage: str) -> Any:
    specs = [s for s in tf.nest.flatten(trace.structured_input_signature) if hasattr(s, "shape")]
    return compiler_ir.from_concrete_function(trace, specs)(
        stage=stage, device_name=f"/device:CPU:{replica}"
    )


def _without_names(text: str) -> list[str]:
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return re.sub(r"(_inference\w*?|_body|_cond|_true|_false)_\d+", r"\1", text).splitlines()
