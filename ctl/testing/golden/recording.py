"""Records what a trainer computes in each step, and how far rounding errors may move it.

A floating-point sum in another order, or by other instructions, has other rounding errors. By backward
error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapter 3) a computed
matrix product is the exact product of matrices whose elements have small relative errors. How far such
errors move a training run depends on the model, the optimizer and the step, so the recording measures
it: `PERTURBED_RUNS` repetitions compute each step at the weights w (1 +- r), with random signs, and
apply it to w. The size r is 64 units in the last place in float32 and float64, the typical error of a
sum of 4096 products, and one unit in 16 bits, where products are summed in float32. Let R be the
largest distance |w' - w| of a tensor between a repetition and the recording up to a step, L the largest
difference of the loss up to it, e = 2^-23 (2^-52 in float64), and U the sum of the norms of the
tensor's updates. The loss may differ by FACTOR (L + e |loss|), and the norm of an update, which is the
difference of two weights, by 2 FACTOR (R + e |w| + e U). The terms with e are for weights that are 0,
which the repetitions do not move. FACTOR covers what a few repetitions do not show; docs/testing.md has
the largest ratio that was measured on other replicas, kernels and instruction sets.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import ctl
from ctl.configs.keys import OPTION_KEYS
from ctl.data.features import flatten_features
from ctl.errors import UsageError
from ctl.hardware import devices, host
from ctl.hardware.strategies import spec_of
from ctl.loop import json_files
from ctl.replica.step.engine import engine_of
from ctl.replica.step.microbatches import unpack
from ctl.testing.contents import Name, contents_of, values_of
from ctl.testing.logical_devices import copies
from ctl.trainer import StandardTrainer

_FORMAT = 2
_ABOUT = "Recorded by ctl.testing.assert_curve; do not edit. Record again: pytest --update_golden"


@dataclasses.dataclass(frozen=True)
class Step:
    """The values that one step computed. The lists have one item for each tensor of the curve.

    Attributes:
        loss: the loss of the global batch; NaN if the trainer's loop reports none.
        update: the norms of the changes of the tensors.
        bits: hashes of the tensors after the step.
        other_bits: a hash of all other variables, such as the slots of the optimizer.
        batch: a hash of each feature of the global batch, by name; {} if it cannot be read.
        loss_tolerance, tolerance: how far the loss and each update may differ where bits cannot be
            compared; measured by `recording.py`.
    """

    loss: float
    update: list[float]
    bits: list[str]
    other_bits: str
    batch: Mapping[str, str]
    loss_tolerance: float = 0.0
    tolerance: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Curve:
    """The steps of a training run, and what their bits depend on.

    Attributes:
        environment: versions, CPU, devices, strategy, and the options of the trainer and its optimizer.
        repeatable: whether a second run on the same machine computed the same bits.
        tensors: the trainable variables and moving statistics, name -> shape.
        steps: the steps, from the first.
    """

    environment: Mapping[str, str]
    repeatable: bool
    tensors: Mapping[str, list[int]]
    steps: list[Step]


def read(path: pathlib.Path) -> Curve:
    """Reads a golden file.

    Raises:
        UsageError: the file is damaged, or was written by another version of ctl.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError(f"format {_FORMAT} is required")
        content.pop("about")
        steps = [Step(**step) for step in content.pop("steps")]
        return Curve(steps=steps, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path} cannot be read as a golden curve ({error!r}): restore it, or record it again by "
            "pytest --update_golden."
        ) from None


def write(path: pathlib.Path, curve: Curve) -> None:
    """Writes a golden file, one line per step, completely or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    content: dict[str, Any] = {"format": _FORMAT, "about": _ABOUT, **dataclasses.asdict(curve)}
    steps = ",\n".join(f"    {json.dumps(step)}" for step in content.pop("steps"))
    head = json.dumps(content, indent=2).removesuffix("\n}")
    temporary = path.with_name(json_files.temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f'{head},\n  "steps": [\n{steps}\n  ]\n}}\n', encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}).") from None


FACTOR = 4.0
PERTURBED_RUNS = 3
_TENSORS = ("update", "statistic")  # the kinds of variables that a curve describes one by one
# Relative size of the rounding errors. The typical error of a sum of n products is sqrt(n) units in the
# last place: 64 for n = 4096. Products of 16-bit numbers are summed in float32, and rounded once.
_ROUNDING = {
    "float64": 64 * 2.0**-52, "float32": 64 * 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10,
}  # fmt: skip

Values = dict[Name, np.ndarray]
Computed = tuple[float, Values]  # the loss of a step, and all variables after it


def record(trainer: StandardTrainer, steps: int, *, measure_tolerance: bool) -> Curve:
    """Trains a trainer and records its curve.

    Args:
        trainer: an untrained trainer; afterwards it has made `steps` steps.
        steps: the number of steps.
        measure_tolerance: also repeat the steps, once as they are and `PERTURBED_RUNS` times with
            rounding errors. The trainer then ends with the weights of a repetition. The weights of
            every step are held in memory.
    """
    _check(trainer, steps, repeats=measure_tolerance)
    batches = itertools.chain(_hash_batches(trainer, steps), itertools.repeat({}))
    run = _Run(trainer)
    tensors: dict[str, list[int]] = {}
    for (kind, name), value in _select_tensors(run.start).items():
        tensors[f"{name} ({kind})" if name in tensors else name] = list(value.shape)
    recorded = [run.step() for _ in range(steps)]
    values = [run.start, *(values for _, values in recorded)]
    described = [
        dataclasses.replace(_describe(loss, after, before), batch=batch)
        for (loss, after), before, batch in zip(recorded, values, batches, strict=False)
    ]
    repeatable = True
    if measure_tolerance:
        run.restart()
        repeatable = all(_hash(run.step()[1]) == _hash(values) for _, values in recorded)
        described = _add_tolerances(run, recorded, described, trainer.options.precision)
    return Curve(
        environment=describe_environment(trainer),
        repeatable=repeatable,
        tensors=tensors,
        steps=described,
    )


class _Run:
    """Trains step by step, reads all variables, and can start again."""

    def __init__(self, trainer: StandardTrainer):
        self._trainer = trainer
        # Traces the step, which creates the slots of optimizers, without running it: a variable that
        # does not exist yet could not be restored.
        trainer.train(tf.constant(0))
        engine = engine_of(trainer)
        engine.checks_copies = engine.plan.layout.replicas > 1
        self.start = values_of(trainer)
        variables = contents_of(trainer).name_variables().values()
        self._copies = [(v, copies(trainer.strategy, v)) for v in variables]

    def step(self) -> Computed:
        outputs = self._trainer.train(tf.constant(1)) or {}
        return float(outputs.get("loss", np.nan)), values_of(self._trainer)

    def restart(self) -> None:
        """Assigns the initial values; the data follows the global step."""
        for variable, values in self._copies:
            local = self._trainer.strategy.experimental_local_results(variable)
            for copy, value in zip(local, values, strict=True):
                copy.assign(value)

    def perturbed_step(self, random: np.random.Generator) -> Computed:
        """Makes a step at weights with rounding errors, and applies it to the weights without."""
        rounding, changes = _ROUNDING[self._trainer.options.precision], []
        for (kind, _), variable in contents_of(self._trainer).name_variables().items():
            if kind == "update" and variable.dtype.is_floating:
                value = variable.numpy()
                change = rounding * value * random.choice([-1, 1], value.shape)
                changes.append((variable, change.astype(value.dtype)))
        for variable, change in changes:
            variable.assign_add(change)
        loss, _ = self.step()
        for variable, change in changes:
            variable.assign_sub(change)
        return loss, values_of(self._trainer)


def _add_tolerances(
    run: _Run, recorded: list[Computed], described: list[Step], precision: str
) -> list[Step]:
    """Repeats the steps with rounding errors; adds how far the losses and tensors may differ."""
    losses = np.zeros([PERTURBED_RUNS, len(recorded)])
    distances = np.zeros([PERTURBED_RUNS, len(recorded), len(described[0].update)])
    for repetition in range(PERTURBED_RUNS):
        run.restart()
        random = np.random.default_rng(repetition)
        for k, (expected_loss, expected) in enumerate(recorded):
            loss, values = run.perturbed_step(random)
            losses[repetition, k] = abs(loss - expected_loss)
            distances[repetition, k] = [
                _norm(values[name].astype(np.float64) - value)
                for name, value in _select_tensors(expected).items()
            ]
    epsilon = 2.0 ** (-52 if precision == "float64" else -23)
    norms = np.array([[_norm(v) for v in _select_tensors(w).values()] for _, w in recorded])
    moved = np.cumsum([step.update for step in described], axis=0)
    size = np.abs([step.loss for step in described])
    loss_tolerance = np.nan_to_num(np.maximum.accumulate(losses.max(axis=0)) + epsilon * size)
    tolerance = np.maximum.accumulate(distances.max(axis=0)) + epsilon * (norms + moved)
    return [
        dataclasses.replace(
            step,
            loss_tolerance=FACTOR * float(loss_tolerance[k]),
            tolerance=(2 * FACTOR * tolerance[k]).tolist(),
        )
        for k, step in enumerate(described)
    ]


def _describe(loss: float, values: Values, before: Values) -> Step:
    tensors = _select_tensors(values)
    return Step(
        loss=loss,
        update=[_norm(value.astype(np.float64) - before[name]) for name, value in tensors.items()],
        bits=[_hash({name: value}) for name, value in tensors.items()],
        other_bits=_hash({name: v for name, v in values.items() if name not in tensors}),
        batch={},
    )


def _select_tensors(values: Values) -> Values:
    return {name: value for name, value in values.items() if name[0] in _TENSORS}


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64).ravel()))


def _hash(values: Mapping[Name, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values.values():
        # Texts are objects in an array, of which the bytes are addresses.
        digest.update(
            np.ascontiguousarray(value.astype("S") if value.dtype == object else value).tobytes()
        )
    return digest.hexdigest()


def _hash_batches(trainer: StandardTrainer, steps: int) -> Iterator[Mapping[str, str]]:
    """Yields the hashes of the first global batches, if they do not depend on the replicas."""
    engine, size = engine_of(trainer), trainer.global_batch_size
    if engine.own_dataset or engine.pipeline.data("train").selects_rows:
        return
    dataset = engine.pipeline.training_dataset(size, start=0)
    for element in itertools.islice(dataset, steps):
        batch, _ = unpack(element)
        rows = {
            name: np.concatenate(copies(trainer.strategy, v))
            for name, v in flatten_features(batch).items()
        }
        yield {name: _hash({("batch", name): value[:size]}) for name, value in rows.items()}


def _check(trainer: StandardTrainer, steps: int, *, repeats: bool) -> None:
    if steps < 1:
        raise UsageError(f"steps is {steps}, but must be at least 1.")
    if spec_of(trainer.strategy).multi_process:
        raise UsageError(
            "A golden curve is that of one process, but the trainer has a "
            f"{type(trainer.strategy).__name__}: pass a trainer with a strategy of this process, such "
            "as ctl.testing.make_strategy(2)."
        )
    if int(trainer.global_step.numpy()):
        raise UsageError(
            f"The trainer has made {int(trainer.global_step.numpy())} steps, but a golden curve starts "
            "at the first: pass a new trainer."
        )
    if repeats and engine_of(trainer).own_dataset:
        raise UsageError(
            "A recording repeats its steps, which a train_dataset of your own does not allow: let "
            "build_dataset return the data."
        )


def describe_environment(trainer: StandardTrainer) -> dict[str, str]:
    """Returns the versions, the CPU, the devices and the options of a trainer, by name."""
    plan, options = engine_of(trainer).plan, trainer.options
    names = sorted({name.partition(":")[0] for name in devices.replica_devices(trainer.strategy)})
    layout = {"strategy": plan.strategy, "replicas": str(plan.layout.replicas)}
    return {
        "ctl": ctl.__version__,
        "tensorflow": tf.__version__,
        "tf_keras": tf_keras.__version__,
        "numpy": np.__version__,
        # Its exponential function and logarithm are used by some kernels.
        "C library": " ".join(platform.libc_ver()),
        "devices": ", ".join(names),
        **(_describe_gpus() if "GPU" in names else {}),
        **host.describe_kernels(tf.config.threading.get_intra_op_parallelism_threads()),
        # With logical shards the order is the same on any number of replicas.
        **({} if options.logical_shards else layout),
        **{key: str(getattr(options, option)) for option, key in OPTION_KEYS.items()},
        "runtime.xla": plan.xla,
        "data.global_batch_size": str(trainer.global_batch_size),
        **{f"model.{name}": str(value) for name, value in options.model.items()},
        **{f"loss_weights.{name}": str(f) for name, f in options.loss_weights.items()},
        "optimizer.clip": str(options.clip),
        **_describe_optimizer(getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)),
    }


def _describe_gpus() -> dict[str, str]:
    """Returns the models of the visible GPUs, and whether they round products to TensorFloat-32."""
    models = set()
    for gpu in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
        model = details.get("device_name", "unknown model")
        models.add(f"{model}, compute capability {capability}")
    return {
        "GPU": "; ".join(sorted(models)),
        "TensorFloat-32": str(tf.config.experimental.tensor_float_32_execution_enabled()),
    }


def _describe_optimizer(optimizer: tf_keras.optimizers.Optimizer) -> dict[str, str]:
    config = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
    options = {f"optimizer {k}": str(v) for k, v in config.items() if k != "name"}
    return {"optimizer": type(optimizer).__name__, **options}
