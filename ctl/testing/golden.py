"""ctl.testing.assert_curve: asserts that training computes the values in a golden file.

On the same machine, with the same versions and options, the bits must be equal. Elsewhere sums have
another order and other rounding errors, and one relative tolerance holds.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import pkgutil
import platform
from typing import Any, TypeAlias

from ml_collections import config_dict
import numpy as np
import tensorflow as tf
import tf_keras

from ctl.built.inner_loop import plan_of
from ctl.errors import UsageError, list_some, print_line
from ctl.hardware import devices, host
from ctl.keras.keras3 import private
from ctl.loop import json_files
from ctl.testing.contents import Name, values_of
from ctl.trainer import StandardTrainer
from ctl.version import find_version

UPDATE = "CTL_UPDATE_GOLDEN"  # the variable that the pytest option --update_golden sets
RTOL = 1e-3
_FORMAT = 3  # 2 had a tolerance for each value
_RECORD = "record the curve again: pytest --update_golden"
_TENSORS = ("update", "statistic")  # the kinds of variables that a curve describes one by one

Experiment: TypeAlias = str | os.PathLike[str] | config_dict.ConfigDict | StandardTrainer
Values: TypeAlias = Mapping[Name, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Curve:
    """The steps of a training run, and what their bits depend on.

    Attributes:
        environment: versions, CPU, devices, strategy, and the options of the trainer.
        tensors: the trainable variables and moving statistics, name -> shape.
        steps: the steps, from the first. Each has the "loss" of the global batch, NaN if the trainer's
            loop reports none; "update", a list of the norm of the change of each tensor; and "bits", a
            hash of all variables after the step, also of those of the optimizer.
    """

    environment: Mapping[str, str]
    tensors: Mapping[str, list[int]]
    steps: list[dict[str, Any]]


def assert_curve(
    path: str | os.PathLike[str],
    experiment: Experiment,
    *,
    steps: int = 20,
    rtol: float = RTOL,
    bits: bool = True,
) -> tuple[str, ...]:
    """Asserts that the first steps of training compute the values that a golden file has recorded.

        def test_training_is_unchanged():
            ctl.testing.assert_curve("golden/mnist.json", "experiments/mnist.py", steps=20)

    The golden file has, for each step, the loss, and for each trainable variable and moving statistic
    the norm of its update, and a hash of all variables. If versions, CPU, devices, strategy and
    options are as in the recording, the bits must be the same. Otherwise the loss and the norms are
    compared.

    `pytest --update_golden`, or the environment variable CTL_UPDATE_GOLDEN=1, records the file. It is
    never written otherwise, and a missing file is an error: a test that records what it finds passes
    in a checkout in which the file was forgotten.

    Args:
        path: the golden file; commit it together with the test.
        experiment: a config file, the result of `ctl.config(...)`, or an untrained trainer, which this
            function trains.
        steps: the number of steps; at most as many as in the recording.
        rtol: where bits are not compared, the tolerance of the loss, relative to the loss, and of the
            norm of each update, relative to the norm of all updates of the step.
        bits: False if two runs on one machine compute different bits, as some kernels of GPUs do.

    Returns:
        Why bits were not compared, one text per difference, such as "tensorflow: 2.19.0 -> 2.20.0";
        empty if they were.

    Raises:
        AssertionError: a step differs; the message names the first one, the first tensor in it, and
            what has changed.
        UsageError: there is no such file, it is damaged, or the trainer is not a new one.
    """
    file = pathlib.Path(path)
    if is_updating():
        curve = _record(experiment, steps)
        write(file, curve)
        print_line(f"{file}: recorded {steps} steps of {len(curve.tensors)} tensors")
        return ()
    recorded, actual = read(file), _record(experiment, steps)
    changes = find_changes(actual, recorded, bits=bits)
    if difference := find_difference(actual, recorded, rtol if changes else 0.0):
        how = "the same bits are required, since nothing that determines them has changed"
        if changes:
            how = f"the relative tolerance rtol holds, since {list_some(changes)}"
        raise AssertionError(
            f"{file}: {difference}.\n  How: {how}.\n  If the change is intended, {_RECORD}."
        )
    return tuple(changes)


def is_updating() -> bool:
    """Returns whether `assert_curve` records golden files instead of comparing with them."""
    return os.environ.get(UPDATE, "0") not in ("", "0")


def find_changes(actual: Curve, recorded: Curve, *, bits: bool = True) -> list[str]:
    """Returns why the bits of two curves may differ."""
    changes = [] if bits else ["bits=False"]
    for key in dict.fromkeys([*recorded.environment, *actual.environment]):
        old, new = (curve.environment.get(key, "not set") for curve in (recorded, actual))
        if old != new and key != "ctl":  # another version of it is no reason for other bits
            changes.append(f"{key}: {old:.60} -> {new:.60}")
    return changes


def find_difference(actual: Curve, recorded: Curve, rtol: float) -> str:
    """Compares the steps of a run, which may be fewer, with a recorded curve.

    Args:
        actual: the curve of the run.
        recorded: the recorded curve.
        rtol: the relative tolerance; 0 requires the same bits.

    Returns:
        The first difference, or "".
    """
    if len(actual.steps) > len(recorded.steps):
        raise UsageError(
            f"The golden curve has {len(recorded.steps)} steps, but {len(actual.steps)} are required: "
            f"{_RECORD}."
        )
    tables = (curve.tensors.items() for curve in (actual, recorded))
    for here, there in itertools.zip_longest(*tables, fillvalue=("no variable",)):
        if here[1:] != there[1:]:  # names are not compared: Keras numbers the layers of a process
            texts = [" ".join(map(str, each)) for each in (here, there)]
            return f"The trainer has {texts[0]}, where {texts[1]} was recorded"
    labels = ["loss", *(f"norm of the update of {name}" for name in recorded.tensors)]
    for number, (step, expected) in enumerate(zip(actual.steps, recorded.steps, strict=False), 1):
        new, old = ([each["loss"], *each["update"]] for each in (step, expected))
        scales = [abs(old[0]), *[np.linalg.norm(old[1:])] * (len(old) - 1)]
        for label, value, before, scale in zip(labels, new, old, scales, strict=True):
            distance = abs(value - before)
            is_same = value == before or (np.isnan(value) and np.isnan(before))
            if not is_same and not distance <= rtol * scale:  # true if one of them is NaN
                numbers = f"{value:.9g} instead of {before:.9g} (difference {distance:.2g})"
                return f"Step {number}: the {label} is {numbers}"
        if not rtol and step["bits"] != expected["bits"]:
            same = "with the same loss and norms of the updates"
            return f"Step {number}: variables have other bits, {same}"
    return ""


def read(path: pathlib.Path) -> Curve:
    """Reads a golden file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("it was written by another version of ctl")
        return Curve(**content)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} cannot be read as a golden curve ({reason}): restore it, or {_RECORD}."
        ) from None


def write(path: pathlib.Path, curve: Curve) -> None:
    """Writes a golden file, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    json_files.replace(path, {"format": _FORMAT, **vars(curve)})


def _record(experiment: Experiment, steps: int) -> Curve:
    if isinstance(experiment, StandardTrainer):
        return record(experiment, steps)
    private.reset_names()  # Keras numbers the layers of a process, and options name variables by pattern
    run_class = pkgutil.resolve_name("ctl:Run")  # by name: it is above this layer
    with run_class(experiment, print_lines=False) as run:
        return record(run.trainer, steps)


def record(trainer: StandardTrainer, steps: int) -> Curve:
    """Trains a new trainer and records its curve."""
    if steps < 1:
        raise UsageError(f"steps is {steps}, but must be at least 1.")
    if trained := int(trainer.global_step.numpy()):
        raise UsageError(
            f"The trainer has made {trained} steps, but a golden curve starts at the first: pass a new "
            "trainer."
        )
    trainer.train(tf.constant(0))  # traces the step, which creates the slots of optimizers
    values, recorded = values_of(trainer), []
    tensors: dict[str, list[int]] = {}
    for (kind, name), value in _select_tensors(values).items():
        tensors[f"{name} ({kind})" if name in tensors else name] = list(value.shape)
    for _ in range(steps):
        before, outputs = values, trainer.train(tf.constant(1)) or {}
        values = values_of(trainer)
        recorded.append(describe_step(float(outputs.get("loss", np.nan)), values, before))
    return Curve(describe_environment(trainer), tensors, recorded)


def describe_step(loss: float, values: Values, before: Values) -> dict[str, Any]:
    """Returns what a curve has of a step, from all variables after it and before it."""
    tensors = _select_tensors(values)
    changes = [value.astype(np.float64) - before[name] for name, value in tensors.items()]
    digest = hashlib.blake2b(digest_size=8)
    # One by one: together they need the memory of all variables again.
    for value in values.values():
        digest.update(value.tobytes())
    return {
        "loss": loss,
        "update": [float(np.linalg.norm(change.ravel())) for change in changes],
        "bits": digest.hexdigest(),
    }


def _select_tensors(values: Values) -> Values:
    return {name: value for name, value in values.items() if name[0] in _TENSORS}


def describe_environment(trainer: StandardTrainer) -> dict[str, str]:
    """Returns the versions, the CPU, the devices and the options of a trainer, by name."""
    plan, options = plan_of(trainer), trainer.options
    optimizer = getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)
    config = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
    kinds = sorted({name.partition(":")[0] for name in devices.replica_devices(trainer.strategy)})
    described = {
        "ctl": find_version(),
        "tensorflow": tf.__version__,
        "tf_keras": tf_keras.__version__,
        "numpy": np.__version__,
        # Some kernels use its exponential function and logarithm.
        "C library": " ".join(platform.libc_ver()),
        "devices": ", ".join(kinds),
        **host.describe_kernels(tf.config.threading.get_intra_op_parallelism_threads()),
        # The keys of the data may name folders of one machine.
        **{name: str(value) for name, value in vars(options).items() if name != "data"},
        "xla": plan.xla,
        "global_batch_size": str(trainer.global_batch_size),
        "optimizer": type(optimizer).__name__,
        **{f"optimizer {key}": str(value) for key, value in config.items() if key != "name"},
    }
    if not options.logical_shards:  # with them, the order is the same on any number of replicas
        described |= {"strategy": plan.strategy, "replicas": str(plan.layout.replicas)}
    if "GPU" in kinds:
        query = tf.config.experimental
        gpus = map(query.get_device_details, tf.config.get_visible_devices("GPU"))
        described["GPU"] = "; ".join(sorted({*map(str, gpus)}))
        described["TensorFloat-32"] = str(query.tensor_float_32_execution_enabled())
    return described
