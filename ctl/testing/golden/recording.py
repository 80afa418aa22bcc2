"""Records what a trainer computes in each step, and how strongly it reacts to rounding errors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools

import numpy as np
import tensorflow as tf

from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import GlobalBatches, PerReplica
from ctl.errors import UsageError
from ctl.replica.step.build import seed_and_precision
from ctl.replica.step.engine import engine_of
from ctl.testing.golden import environment
from ctl.testing.golden.curve import Curve, Step
from ctl.testing.recording import Name, name_variables, read_value
from ctl.trainer import StandardTrainer

PERTURBED_RUNS = 3
_TENSORS = ("update", "statistic")  # the kinds of variables that a curve describes one by one
# Relative size of the rounding errors. The typical error of a sum of n products is sqrt(n) units in the
# last place: 64 for n = 4096. Products of 16-bit numbers are summed in float32, and rounded once.
_ROUNDING = {
    "float64": 64 * 2.0**-52, "float32": 64 * 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10,
}  # fmt: skip

Values = dict[Name, np.ndarray]


def record(trainer: StandardTrainer, steps: int, *, measure_response: bool) -> Curve:
    """Trains a trainer and records its curve.

    Args:
        trainer: an untrained trainer; afterwards it has made `steps` steps.
        steps: the number of steps.
        measure_response: also repeat the steps, once as they are and `PERTURBED_RUNS` times with
            rounding errors, to measure how strongly the curve reacts. The trainer then ends with the
            weights of a repetition. The weights of every step are held in memory.
    """
    _check(trainer, steps, repeats=measure_response)
    batches = itertools.chain(_hash_batches(trainer, steps), itertools.repeat({}))
    run = _Run(trainer, creates_slots=measure_response)
    tensors: dict[str, list[int]] = {}
    for (kind, name), value in _select_tensors(run.start):
        tensors[f"{name} ({kind})" if name in tensors else name] = list(value.shape)
    recorded = [run.step() for _ in range(steps)]
    described = [
        dataclasses.replace(_describe(values, loss, before), batch=batch)
        for (loss, values), (_, before), batch in zip(
            recorded, [(None, run.start), *recorded], batches, strict=False
        )
    ]
    repeatable = True
    if measure_response:
        run.restart()
        repeatable = all(
            _hash(run.step()[1].values()) == _hash(values.values()) for _, values in recorded
        )
        described = _measure_response(run, recorded, described)
    return Curve(
        environment=environment.describe_environment(trainer),
        computation=environment.describe_computation(trainer),
        settings=environment.describe_settings(trainer),
        repeatable=repeatable,
        tensors=tensors,
        steps=described,
    )


class _Run:
    """Trains step by step, reads all variables, and can start again."""

    def __init__(self, trainer: StandardTrainer, *, creates_slots: bool):
        self._trainer = trainer
        if creates_slots:
            # Traces the step, which creates the slots of optimizers, without running it: a variable
            # that does not exist yet could not be restored.
            trainer.train(tf.constant(0))
            engine = engine_of(trainer)
            engine.checks_copies = engine.plan.layout.replicas > 1
        self.start = self.read()
        self._copies = {
            name: [np.array(copy.numpy()) for copy in self._local(v)]
            for name, v in name_variables(trainer).items()
        }

    def read(self) -> Values:
        trainer = self._trainer
        return {name: read_value(trainer, v) for name, v in name_variables(trainer).items()}

    def step(self) -> tuple[float | None, Values]:
        outputs = self._trainer.train(tf.constant(1)) or {}
        loss = float(outputs["loss"]) if "loss" in outputs else None
        return loss, self.read()

    def restart(self) -> None:
        """Assigns the initial values; the data follows the global step."""
        for name, variable in name_variables(self._trainer).items():
            for copy, value in zip(self._local(variable), self._copies[name], strict=True):
                copy.assign(value)

    def perturbed_step(self, random: np.random.Generator) -> tuple[float | None, Values]:
        """Makes a step at weights with rounding errors, and applies it to the weights without."""
        rounding = _ROUNDING[self._trainer.options.precision]
        named = name_variables(self._trainer)
        changes = []
        for (kind, _), variable in named.items():
            if kind != "update" or not variable.dtype.is_floating:
                continue
            copies = self._local(variable)
            value = copies[0].numpy()
            change = (rounding * value * random.choice([-1, 1], value.shape)).astype(value.dtype)
            changes.append((copies, change))
        for copies, change in changes:
            for copy in copies:
                copy.assign_add(change)
        loss, _ = self.step()
        for copies, change in changes:
            for copy in copies:
                copy.assign_sub(change)
        return loss, self.read()

    def _local(self, variable: tf.Variable) -> Sequence[tf.Variable]:
        return self._trainer.strategy.experimental_local_results(variable)


def _measure_response(
    run: _Run, recorded: Sequence[tuple[float | None, Values]], described: Sequence[Step]
) -> list[Step]:
    """Repeats the steps with rounding errors; adds how far the losses and tensors move."""
    losses = np.zeros([PERTURBED_RUNS, len(recorded)])
    distances = np.zeros([PERTURBED_RUNS, len(recorded), len(described[0].norm)])
    for repetition in range(PERTURBED_RUNS):
        run.restart()
        random = np.random.default_rng(repetition)
        for k, (expected_loss, expected) in enumerate(recorded):
            loss, values = run.perturbed_step(random)
            if loss is not None and expected_loss is not None:
                losses[repetition, k] = abs(loss - expected_loss)
            distances[repetition, k] = [
                _norm(values[name].astype(np.float64) - value)
                for name, value in _select_tensors(expected)
            ]
    return [
        dataclasses.replace(
            step,
            loss_response=float(losses[:, k].max()),
            response=distances[:, k].max(axis=0).tolist(),
        )
        for k, step in enumerate(described)
    ]


def _describe(values: Values, loss: float | None, before: Values) -> Step:
    tensors = list(_select_tensors(values))
    others = [value for name, value in values.items() if name[0] not in _TENSORS]
    return Step(
        loss=loss,
        norm=[_norm(value) for _, value in tensors],
        update=[_norm(value.astype(np.float64) - before[name]) for name, value in tensors],
        projection=[_project(value, i) for i, (_, value) in enumerate(tensors)],
        bits=[_hash([value]) for _, value in tensors],
        other_bits=_hash(others),
        batch={},
    )


def _select_tensors(values: Values) -> Iterator[tuple[Name, np.ndarray]]:
    return ((name, value) for name, value in values.items() if name[0] in _TENSORS)


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64).ravel()))


def _project(value: np.ndarray, index: int) -> float:
    """Returns the product with a vector of signs, which is the same in every version of numpy."""
    words = np.random.Philox(key=index).random_raw(-(-value.size // 64)).astype("<u8")
    signs = np.unpackbits(words.view(np.uint8))[: value.size]
    flat = value.astype(np.float64).ravel()
    return float(flat[signs == 1].sum() - flat[signs == 0].sum())


def _hash(values: Iterable[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _hash_batches(trainer: StandardTrainer, steps: int) -> Iterator[Mapping[str, str]]:
    """Yields the hashes of the first global batches, if the data can be read by one process."""
    engine = engine_of(trainer)
    if engine.own_dataset:
        return
    pipeline = InputPipeline(
        trainer.build_dataset,
        strategy=tf.distribute.OneDeviceStrategy("/CPU:0"),
        seed=trainer.options.seed,
        prefetch=1,
        build_scope=functools.partial(seed_and_precision, trainer.options),
    )
    data = pipeline.data("train")
    if isinstance(data, PerReplica):
        return
    dataset = pipeline.training_dataset(trainer.global_batch_size, start=0)
    for element in itertools.islice(dataset, steps):
        is_dict = isinstance(data, GlobalBatches) and isinstance(element, dict)
        batch = element if is_dict else element[0]
        yield {name: _hash([np.asarray(value)]) for name, value in batch.items()}


def _check(trainer: StandardTrainer, steps: int, *, repeats: bool) -> None:
    if steps < 1:
        raise UsageError(f"steps is {steps}, but must be at least 1.")
    several = (
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.ParameterServerStrategy,
    )
    if isinstance(trainer.strategy, several):
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
