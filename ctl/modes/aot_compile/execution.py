"""Runs an exported train step on virtual devices of the CPU, and compares it with one device."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.built.inner_loop import loop_of, pipeline_of, step_of
from ctl.configs import overrides
from ctl.errors import Failure
from ctl.hardware import selection
from ctl.modes import experiment
from ctl.modes.aot_compile import compiler_process
from ctl.modes.aot_compile.programs import export_train_step
from ctl.modes.aot_compile.strategy import SliceStrategy
from ctl.trainer import StandardTrainer

_STEPS = 2
# The largest difference that rounding in float32 explains, relative to the change of a variable.
_BOUND = 0.01
_PROGRAM = pathlib.Path(__file__).with_name("virtual_devices.py")


@dataclasses.dataclass(frozen=True)
class Execution:
    """A program of several replicas, and its arguments.

    Attributes:
        hlo: the program of a replica, a serialized HLO module.
        replicas: the number of replicas.
        steps: how often the program runs.
        arguments: "I_R" -> argument I of replica R; "I_R_N" -> the same in step N.
        places: the variable in `state(trainer)` of each argument; None for another argument.
    """

    hlo: bytes
    replicas: int
    steps: int
    arguments: Mapping[str, np.ndarray]
    places: Sequence[int | None]


@dataclasses.dataclass(frozen=True)
class CoreComparison:
    """The result of the train steps of several cores beside those of one device.

    Attributes:
        cores: the number of cores.
        difference: the largest difference of a variable from that of one device, in the Euclidean norm,
            relative to its change; infinite if the cores hold different values.
        variable: the name of that variable.
    """

    cores: int
    difference: float
    variable: str

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= _BOUND

    def __str__(self) -> str:
        verdict = "computes" if self.is_right else "DOES NOT compute"
        return (
            f"On virtual devices of this CPU, the train step of {self.cores} cores {verdict} the first "
            f"{_STEPS} steps of one device, in float32: the largest difference is {self.difference:.1e} "
            f"of the change of {self.variable}; rounding explains {_BOUND:g}."
        )


class VirtualDevices:
    """Runs programs in one process of the compiler's environment.

        with VirtualDevices(8).started() as devices:
            results = devices.run(execution)

    Args:
        count: the largest number of replicas.
    """

    def __init__(self, count: int):
        self._count = count
        self._process: Any = None

    @contextlib.contextmanager
    def started(self) -> Iterator["VirtualDevices"]:
        """Runs the process within a `with` block."""
        command = [*compiler_process.find_python(), str(_PROGRAM), str(self._count)]
        with subprocess.Popen(
            command,
            env=compiler_process.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as self._process:
            yield self

    def run(self, execution: Execution) -> dict[int, list[np.ndarray]]:
        """Returns the variables after the last step: place -> the value on each replica.

        Raises:
            Failure: the program does not run.
        """
        with tempfile.TemporaryDirectory(prefix="ctl-execution-") as name:
            folder = pathlib.Path(name)
            (folder / "program.hlo").write_bytes(execution.hlo)
            np.savez(folder / "arguments.npz", **dict[str, Any](execution.arguments))
            request = {"replicas": execution.replicas, "steps": execution.steps}
            (folder / "request.json").write_text(json.dumps(request))
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
            if "error" in answer:
                raise Failure(f"The program does not run on virtual devices: {answer['error']}")
            results = dict(np.load(folder / "results.npz"))
        return {
            place: [results[f"{i}_{r}"] for r in range(execution.replicas)]
            for i, place in enumerate(execution.places)
            if place is not None and f"{i}_0_0" not in execution.arguments
        }


def compare(config: Any, config_path: str, cores: int) -> CoreComparison:
    """Runs the train step of a TPU slice on virtual devices, and compares it with one device.

    It computes in float32, because the differences of 16 bits would hide those of the split.

    Args:
        config: a validated config.
        config_path: the config file.
        cores: the number of cores.

    Raises:
        UsageError: the config does not work on one device.
        Failure: the program does not run on virtual devices.
    """
    config = overrides.with_values(config, {"runtime.precision": "float32"})

    def build(strategy: tf.distribute.Strategy, name: str) -> Any:
        hardware = selection.Hardware(strategy, name, "compiled ahead of time")
        return experiment.build(config, config_path, evaluates=False, hardware=hardware).trainer

    sliced = build(SliceStrategy(cores), "tpu")
    loop_of(sliced).prepare(_STEPS)
    program = export_train_step(sliced)
    with VirtualDevices(cores).started() as devices:
        results = devices.run(of_slice(sliced, program.hlo, _STEPS))
    alone = build(tf.distribute.OneDeviceStrategy("/CPU:0"), "one_device")
    before = [variable.numpy() for variable in state(alone)]
    alone.train(tf.constant(_STEPS))
    expected = [variable.numpy() for variable in state(alone)]
    return CoreComparison(cores, *largest_difference(results, sliced, expected, before=before))


def state(trainer: StandardTrainer) -> list[Any]:
    """Returns the variables that a train step may assign, in an order that holds for any strategy."""
    step = step_of(trainer)
    found: list[Any] = []
    for item in [*step.checkpoint_items().values(), *trainer.metrics.values(), step.results.loss]:
        found += [item] if isinstance(item, tf.Variable) else list(getattr(item, "variables", ()))
    found += [step.update.recorder.state] if step.update.recorder else []
    return list({id(v): v for v in found}.values())


def captured(trace: Any, variables: Sequence[Any]) -> tuple[dict[int, np.ndarray], list[Any]]:
    """Returns the values that a trace captures, and the variable of each of its inputs.

    Args:
        trace: a concrete function.
        variables: the variables, as of `state`.

    Returns:
        Input -> value; and for each input its place in `variables`, or None.
    """
    parts = [
        (place, part) for place, v in enumerate(variables) for part in getattr(v, "values", [v])
    ]
    places = {id(part.handle): place for place, part in parts}
    outer: dict[int, Any] = {id(inner): tensor for tensor, inner in trace.graph.captures}
    handles: list[Any] = [outer.get(id(x)) for x in trace.graph.inputs]
    values = {}
    for i, (x, handle) in enumerate(zip(trace.graph.inputs, handles, strict=True)):
        if x.dtype == tf.resource:
            dtype = handle._handle_data.shape_and_type[0].dtype
            values[i] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()
        elif hasattr(handle, "numpy"):
            values[i] = handle.numpy()
    return values, [places.get(id(handle)) for handle in handles]


def of_slice(trainer: StandardTrainer, hlo: bytes, steps: int) -> Execution:
    """Returns the first steps of a trainer whose train step was exported for a TPU slice.

    Args:
        trainer: a trainer under a `SliceStrategy`.
        hlo: its exported train step.
        steps: the number of steps.
    """
    traced, pipeline = trainer.strategy.traced[-1], pipeline_of(trainer)
    replicas = trainer.strategy.num_replicas_in_sync
    trace = traced.function.get_concrete_function(*traced.specs)
    variables = state(trainer)
    read, places = captured(trace, variables)
    arguments: dict[str, Any] = {
        f"{i}_{r}": value for r in range(replicas) for i, value in read.items()
    }
    others = [i for i in range(len(places)) if i not in read]
    # One pipeline yields the batches of the replicas in turn.
    elements = iter(pipeline.training_dataset(trainer.global_batch_size, start=0))
    for n in range(steps):
        for r in range(replicas):
            given = [v for v in tf.nest.flatten(next(elements)) if v is not None]
            pairs = zip(others, given, strict=True)
            arguments |= {f"{i}_{r}_{n}": value.numpy() for i, value in pairs}
            for i, place in enumerate(places):
                if place is not None and variables[place] is trainer.global_step:
                    arguments[f"{i}_{r}_{n}"] = np.int64(n)  # counted after the program
    return Execution(hlo, replicas, steps, arguments, places)


def largest_difference(
    results: Mapping[int, Sequence[np.ndarray]],
    trainer: StandardTrainer,
    expected: Sequence[np.ndarray],
    *,
    before: Sequence[np.ndarray] | None = None,
) -> tuple[float, str]:
    """Compares the variables of the replicas with those of one device.

    Args:
        results: as `VirtualDevices.run` returns them.
        trainer: the trainer of the program.
        expected: the values of one device, in the order of `state`.
        before: the values before the steps, to compare with the change of each variable.

    Returns:
        The largest difference and its variable's name. The difference is that of the elements, relative
        to the largest element of the variable; or, with `before`, the Euclidean norm, relative to that
        of the change. It is infinite if the replicas hold different values of a variable that they
        share.
    """
    variables, worst = state(trainer), (0.0, "")
    # Each replica adds the loss of the global batch to this mean, and counts it.
    loss = {id(variable) for variable in step_of(trainer).results.loss.variables}
    for place, parts in results.items():
        variable, wanted = variables[place], expected[place].astype(np.float64)
        own = [np.asarray(part, np.float64) for part in parts]
        if variable.synchronization == tf.VariableSynchronization.ON_READ:  # each has its share
            is_sum = variable.aggregation == tf.VariableAggregation.SUM
            own = [np.sum(own, axis=0) if is_sum else np.mean(own, axis=0)]
        if any(not np.array_equal(own[0], part, equal_nan=True) for part in own[1:]):
            return np.inf, variable.name
        value = own[0] / len(parts) if id(variable) in loss else own[0]
        same = (value == wanted) | (np.isnan(value) & np.isnan(wanted))
        with np.errstate(invalid="ignore"):
            errors = np.where(same, 0, np.abs(value - wanted))
        if before is None:
            error = np.max(errors, initial=0)
            scale = np.max(np.abs(wanted[np.isfinite(wanted)]), initial=1e-3)
        else:
            error, change = np.linalg.norm(errors), np.linalg.norm(wanted - before[place])
            scale = change + 1e-6 * np.linalg.norm(wanted) + 1e-9
        share = float(np.nan_to_num(error / scale, nan=np.inf, posinf=np.inf))
        worst = max(worst, (share, variable.name))
    return worst
